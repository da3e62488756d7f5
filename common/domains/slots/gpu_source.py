"""The fused aggregation kernel for a GPU, as CUDA C++ source: written from the rules themselves.

`rules.step` is run once with operands that write down what is done to them, one statement an
operation. So the definition is the only source of the arithmetic: nothing is reordered, and each
operation is an instruction that rounds once to the nearest (`add_rn`, ...), which no compiler
option fuses, approximates or has flush subnormals. Hence the same bits as rules.py and the CPU's
kernels.

A kernel makes one pass over memory: it widens and sums an element's gradients in worker-rank
order, any number of them, applies the rule, writes the other buffers, and raises `unclean` where a
new value has all exponent bits set. Four neighbouring elements are one 16-byte access each where
their address allows it (`wide`).
"""

from functools import cache
from typing import Any, Final

import numpy as np

from slackwater.common.domains.slots.rules import INVERSE, RULES, SCALARS, step
from slackwater.schemas.tensors import DType

OPTIONS: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Belt and braces: the instructions round as they say whatever the options."""
THREADS: Final = 256
"""In a block."""
KERNEL: Final = "slackwater_fold"

_ARITHMETIC: Final = """
#ifdef __CUDA_ARCH__
#define OF_TWO(name, operation) \\
    __device__ __forceinline__ float name(float a, float b) \\
    { \\
        float r; \\
        asm(operation " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); \\
        return r; \\
    }
OF_TWO(add_rn, "add.rn.f32")
OF_TWO(sub_rn, "sub.rn.f32")
OF_TWO(mul_rn, "mul.rn.f32")
OF_TWO(div_rn, "div.rn.f32")
__device__ __forceinline__ float sqrt_rn(float a)
{
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
#else
#define add_rn __fadd_rn
#define sub_rn __fsub_rn
#define mul_rn __fmul_rn
#define div_rn __fdiv_rn
#define sqrt_rn __fsqrt_rn
#endif
__device__ __forceinline__ float absolute(float x)
{
    return __uint_as_float(__float_as_uint(x) & 0x7FFFFFFFu);
}
"""
"""Written as PTX: cupy has NVRTC flush subnormal numbers (-ftz=true, after our options), which the
intrinsics follow."""

_WIDEN: Final[dict[DType, str]] = {
    "float32": """
typedef float slot_t;
__device__ __forceinline__ float widen(slot_t x) { return x; }
""",
    "float16": """
typedef unsigned short slot_t;
__device__ __forceinline__ float widen(slot_t x)
{
    // A subnormal is the difference of two normal numbers: exact.
    const unsigned magnitude = (unsigned)(x & 0x7FFFu) << 13;
    const unsigned exponent = magnitude & 0x0F800000u;
    unsigned value = magnitude + (112u << 23);
    if (exponent == 0x0F800000u)
        value += 112u << 23;
    else if (exponent == 0u)
        value = __float_as_uint(
            sub_rn(__uint_as_float(value + (1u << 23)), __uint_as_float(113u << 23)));
    return __uint_as_float(value | ((unsigned)(x & 0x8000u) << 16));
}
""",
    "bfloat16": """
typedef unsigned short slot_t;
__device__ __forceinline__ float widen(slot_t x) { return __uint_as_float((unsigned)x << 16); }
""",
}

_FOLD: Final = """
template <typename T> struct alignas(4 * sizeof(T)) four {{ T at[4]; }};

__device__ __forceinline__ unsigned unclean_bits(float x)
{{
    return (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u ? 1u : 0u;
}}

__device__ __forceinline__ unsigned rule({rule_parameters})
{{
{statements}
}}

extern "C" __global__ void {kernel}(
    const slot_t* __restrict__ slots, const long long stride, const int workers,
    const long long elements, const int wide,
    {buffer_parameters},
    {scalar_parameters}, unsigned* unclean)
{{
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long quads = wide ? elements / 4 : 0;
    unsigned found = 0;
    for (long long q = first; q < quads; q += step) {{
        four<slot_t> x = reinterpret_cast<const four<slot_t>*>(slots)[q];
        {load_quads}
        {declare_new}
        float g[4];
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            g[e] = widen(x.at[e]);
        for (int rank = 1; rank < workers; ++rank) {{
            x = reinterpret_cast<const four<slot_t>*>(slots + rank * stride)[q];
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                g[e] = add_rn(g[e], widen(x.at[e]));
        }}
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            found |= rule(workers > 1 ? mul_rn(g[e], k{inverse}) : g[e], {quad_arguments});
        {store_quads}
    }}
    for (long long i = 4 * quads + first; i < elements; i += step) {{
        float g = widen(slots[i]);
        for (int rank = 1; rank < workers; ++rank)
            g = add_rn(g, widen(slots[rank * stride + i]));
        found |= rule(workers > 1 ? mul_rn(g, k{inverse}) : g, {single_arguments});
    }}
    if (found)
        atomicOr(unclean, 1u);
}}
"""


_INTRINSICS: Final[dict[Any, str]] = {np.sqrt: "sqrt_rn", np.absolute: "absolute"}
"""Functions of the rules, each rounded once or exact."""


class _Traced:
    """A float32 of the kernel. What is done to it becomes a statement."""

    def __init__(self, name: str, statements: list[str]) -> None:
        self.name = name
        self._statements = statements

    def _emit(self, intrinsic: str, *operands: "_Traced") -> "_Traced":
        made = _Traced(f"t{len(self._statements)}", self._statements)
        names = ", ".join(operand.name for operand in operands)
        self._statements.append(f"const float {made.name} = {intrinsic}({names});")
        return made

    def __add__(self, other: "_Traced") -> "_Traced":
        return self._emit("add_rn", self, other)

    def __sub__(self, other: "_Traced") -> "_Traced":
        return self._emit("sub_rn", self, other)

    def __mul__(self, other: "_Traced") -> "_Traced":
        return self._emit("mul_rn", self, other)

    def __truediv__(self, other: "_Traced") -> "_Traced":
        return self._emit("div_rn", self, other)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: "_Traced") -> "_Traced":
        if ufunc not in _INTRINSICS or method != "__call__":
            raise TypeError(f"the rules use {ufunc.__name__}, which the GPU kernel does not know")
        return self._emit(_INTRINSICS[ufunc], *inputs)


def trace(rule: str) -> tuple[list[str], str, list[str]]:
    """(statements, name of the new parameter, names of the new states) of one element's update
    from g, p, s0, s1, ... and k0, k1, .... Raises ValueError for an unknown rule."""
    statements: list[str] = []
    k: Any = [_Traced(f"k{place}", statements) for place in range(SCALARS)]
    count = RULES[rule].states if rule in RULES else 0
    states: Any = [_Traced(f"s{index}", statements) for index in range(count)]
    g: Any = _Traced("g", statements)
    p: Any = _Traced("p", statements)
    new_p, new_states = step(rule, g, p, states, k)
    names = [state.name for state in new_states]  # type: ignore[attr-defined]  # Traced ones.
    return statements, new_p.name, names  # type: ignore[attr-defined]


@cache
def source(rule: str, dtype: DType) -> str:
    """The kernel `KERNEL` for a rule and the dtype of its gradients. Its parameters: slots, stride,
    workers, elements, wide, (old, new) of the parameters and of each state, the scalars, unclean.
    """
    statements, new_p, new_states = trace(rule)
    olds = ["p", *(f"s{index}" for index in range(len(new_states)))]
    values = [new_p, *new_states]
    scalars = [f"const float k{place}" for place in range(SCALARS)]
    unclean = "0u" if RULES[rule].sums else " | ".join(f"unclean_bits({v})" for v in values)
    body = [
        *statements,
        *(f"*new_{old} = {value};" for old, value in zip(olds, values, strict=True)),
        f"return {unclean};",
    ]
    passed = ", ".join(f"k{place}" for place in range(SCALARS))
    text = _FOLD.format(
        kernel=KERNEL,
        inverse=int(INVERSE),
        statements="\n".join(f"    {line}" for line in body),
        rule_parameters=", ".join(
            ["float g", *(f"float {old}" for old in olds), *scalars]
            + [f"float* new_{old}" for old in olds]
        ),
        buffer_parameters=",\n    ".join(
            f"const float* __restrict__ {old}, float* __restrict__ new_{old}" for old in olds
        ),
        scalar_parameters=", ".join(scalars),
        load_quads="\n        ".join(
            f"const four<float> {old}4 = reinterpret_cast<const four<float>*>({old})[q];"
            for old in olds
        ),
        declare_new="four<float> " + ", ".join(f"new_{old}4" for old in olds) + ";",
        store_quads="\n        ".join(
            f"reinterpret_cast<four<float>*>(new_{old})[q] = new_{old}4;" for old in olds
        ),
        quad_arguments=", ".join(
            [f"{old}4.at[e]" for old in olds] + [passed] + [f"&new_{old}4.at[e]" for old in olds]
        ),
        single_arguments=", ".join(
            [f"{old}[i]" for old in olds] + [passed] + [f"new_{old} + i" for old in olds]
        ),
    )
    return _ARITHMETIC + _WIDEN[dtype] + text
