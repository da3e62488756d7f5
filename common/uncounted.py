"""Arrays in compiled code whose references nobody counts.

numba counts a reference whenever code takes an array out of a tuple, and again when it lets it go:
two locked instructions each time, which threads that share the array pay with a cache line that
goes to and fro. Who passes a tuple of arrays to a compiled function keeps them alive for as long as
it runs; that is enough.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _strip(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, part in enumerate(kind.types):
            stripped = _strip(context, builder, part, builder.extract_value(value, i))
            value = builder.insert_value(value, stripped, i)
    return value


@intrinsic
def _uncounted(_context: Any, value: Any) -> Any:
    """The same arrays, in tuples of any depth; nothing made of it may outlive the call."""
    signature = value(value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _strip(context, builder, signature.return_type, args[0])

    return signature, codegen


uncounted: Any = _uncounted
