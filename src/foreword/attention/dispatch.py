"""The one place where Foreword enters a transformers model: the attention call.

transformers models look up their attention function by name and call it with the attention module, the projected
queries, keys and values, the mask, and every keyword that came in at the top of the model. Foreword re-registers each
function that a model uses with a wrapper of the same name. A call without the keyword `foreword` goes to the original
function untouched; with it, the object that the keyword carries decides (`foreword.attention.readers`). An explicit
keyword, unlike global state, reaches checkpointed layers when they are recomputed, and keeps threads apart.
"""

import functools
import inspect
from collections.abc import Callable

from torch import Tensor, nn
from transformers import AttentionInterface

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

_wrappers: dict[str, AttentionFunction] = {}


def install(implementation: str) -> None:
    """Wrap the attention function registered under `implementation` ("sdpa", "eager", …), unless it is wrapped already.

    Called before every forward, so that a model whose implementation is switched, or a library that registers its own
    function under a known name, never runs past an adapter.
    """
    registered = AttentionInterface._global_mapping.get(implementation, _own_eager)
    if registered is _wrappers.get(implementation):
        return
    _wrappers[implementation] = _wrap(registered)
    AttentionInterface.register(implementation, _wrappers[implementation])


def _wrap(original: AttentionFunction) -> AttentionFunction:
    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask=None, *, foreword=None, **kwargs):
        if foreword is None:
            return original(module, query, key, value, attention_mask, **kwargs)
        return foreword.read(original, module, query, key, value, attention_mask, **kwargs)

    return attention


def _own_eager(module: nn.Module, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
    """The eager attention of the file that defines `module`; each model file has its own, and none is registered."""
    return _eager_of(type(module))(module, *args, **kwargs)


@functools.cache
def _eager_of(attention_class: type[nn.Module]) -> AttentionFunction:
    return inspect.unwrap(attention_class.forward).__globals__["eager_attention_forward"]
