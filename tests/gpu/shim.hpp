// What CUDA C++ has and C++ has not, so that the kernel's own source runs on a CPU: one thread at a
// time, each operation rounding as the intrinsic says. Compile with -ffp-contract=off.
#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__ __restrict

struct place { unsigned x; };
static thread_local place gridDim, blockDim, blockIdx, threadIdx;

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
static inline unsigned atomicOr(unsigned* at, unsigned bits) { const unsigned was = *at; *at |= bits; return was; }

template <typename... Parameters, typename... Arguments>
static void on_grid(
    unsigned blocks, unsigned threads, void (*kernel)(Parameters...), Arguments... arguments)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kernel(arguments...);
}
