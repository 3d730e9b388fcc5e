"""The command line: `foreword <command>`. A command is the function `run` of a module in `foreword.commands`.

The function's parameters are the flags, its docstring is the help; one without a default is positional, and where it is
a `list[str]` it takes one word or more. A parameter `settings` of a dataclass type is spread into one flag a field; a
parameter `method` becomes `--method NAME` with `--method.FIELD` for the fields of that method.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import itertools
import json
import os
import re
import sys
import typing
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from .errors import ForewordError

COMMANDS = {
    "train": "train an adapter on a frozen model",
    "compress": "compress documents into a prefix",
    "generate": "answer a prompt, or a file of prompts",
    "chat": "talk to a model with an adapter",
    "eval": "score a model with or without an adapter, and time it",
    "compare": "compare methods at equal budgets, with intervals and a report",
    "serve": "serve a base and many adapters by OpenAI's HTTP routes",
    "join": "put adapters side by side in one",
    "inspect": "show what is in an adapter folder",
    "convert": "turn an adapter of another library into one of these, or back",
    "push": "upload an adapter to the Hugging Face Hub, with a model card",
    "scaling": "fit the law of parallel streams, or compare what they cost",
    "methods": "list the methods, with their parameter counts on a model",
    "bench": "measure what a method costs on a model, or show the kernels it takes",
    "theory": "simulate the estimation theory of zero-initialised attention",
    "demo": "the main job in minutes: train, compare, report",
}

USAGE = """usage: foreword <command> [options]

Prefix-family fine-tuning of frozen language models.

commands:
{commands}

`foreword <command> --help` shows a command's options and an example. `--config FILE.yaml` gives options by name, and
`--debug` shows tracebacks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for a failure, 2 for something the user can put right."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())), end="")
        return 0 if words else 2
    if words[0] == "--version":
        print(importlib.metadata.version("foreword"))
        return 0
    try:
        return run(words[0], words[1:])
    except (ForewordError, ArgumentError) as error:
        if debug:
            raise
        print(f"foreword: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foreword: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"foreword: {type(error).__name__}: {_one_line(error)} (--debug shows where)", file=sys.stderr)
        return 1


def run(command: str, words: list[str]) -> int:
    """Parse the words after a command, and run it."""
    if command not in COMMANDS:
        raise ForewordError(f"there is no command {command!r}; the commands are {', '.join(COMMANDS)}")
    quiet_libraries()
    function = importlib.import_module(f"foreword.commands.{command}").run
    types = typing.get_type_hints(function)
    parser = ArgumentParser(prog=f"foreword {command}", exit_on_error=False, formatter_class=_Formatter)
    parser.description = str(inspect.getdoc(function)).split("\nArgs:")[0].rstrip()
    skip: set[str | int] = {name for name in ("settings", "method") if name in types}
    lists = _positional_lists(function, types)
    parser.add_function_arguments(function, skip=skip | lists.keys(), as_positional=True)
    for name, text in lists.items():
        parser.add_argument(name, nargs="+", type=str, help=text)
    _spell_keywords(parser)
    if "settings" in types:
        parser.add_class_arguments(types["settings"])
    config, words = _cut(words, "--config")
    words = _words_of_config(config) + words
    extra: dict[str, Any] = {}
    if "method" in types:
        extra["method"], words = _method(parser, words, inspect.signature(function).parameters["method"].default)
    arguments = parser.parse_args(_with_flag_values(parser, words)).as_dict() | extra
    if "settings" in types:
        names = [field.name for field in dataclasses.fields(types["settings"])]
        arguments["settings"] = types["settings"](**{name: arguments.pop(name) for name in names})
    return function(**arguments) or 0


def _positional_lists(function: Any, types: dict[str, Any]) -> dict[str, str]:
    """Parameters without a default that take one word or more, each with its line of the docstring."""
    document = str(inspect.getdoc(function))
    required = [name for name, one in inspect.signature(function).parameters.items() if one.default is one.empty]
    return {name: _described(document, name) for name in required if types[name] == list[str]}


def _described(document: str, name: str) -> str:
    found = re.search(rf"^ +{name}: (.*)$", document, re.MULTILINE)
    return found.group(1) if found else ""


def quiet_libraries() -> None:
    """Keep the libraries' warnings and, where stderr is no terminal, their progress bars out of the way."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def _spell_keywords(parser: ArgumentParser) -> None:
    """Give a parameter `from_`, whose name without the underscore is a keyword of Python, the flag `--from`."""
    for action in parser._actions:
        if action.dest.endswith("_"):
            flag = f"--{action.dest.rstrip('_')}"
            action.option_strings = [flag]
            parser._option_string_actions[flag] = action


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Help with defaults, that leaves the lines of descriptions as they are."""


def _method(parser: ArgumentParser, words: list[str], default: str) -> tuple[Any, list[str]]:
    """Take `--method NAME --method.FIELD VALUE …`, or `--method JSON`, out of the words: the method or methods, the
    rest."""
    from .space import from_dict, method_class

    value, words = _cut(words, "--method")
    value = value or default
    if value.startswith(("[", "{")):
        listed = _yaml(value, "--method")
        return [from_dict(one) for one in (listed if isinstance(listed, list) else [listed])], words
    fields = ArgumentParser(prog=f"--method {value}", exit_on_error=False, formatter_class=_Formatter, usage="")
    fields.add_class_arguments(method_class(value), sub_configs=False)
    own, rest = _split(words, "--method.")
    listing = fields.format_help().split(":\n", 2)[-1].replace("  --", "  --method.")
    parser.epilog = (
        f"--method NAME or --method JSON chooses the method (default: {default}). The fields of {value}:\n{listing}"
    )
    try:
        chosen = fields.parse_args(_with_flag_values(fields, own)).as_dict()
    except ArgumentError as error:
        raise ForewordError(f"--method {value}: {_one_line(error)}") from error
    return from_dict({"method": value, **chosen}), rest


def _words_of_config(path: str | None) -> list[str]:
    """The options in a YAML file as words. They stand before the given ones, which therefore win."""
    if path is None:
        return []
    try:
        options = _yaml(Path(path).read_text(encoding="utf-8"), path) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise ForewordError(f"can't read --config {path}: {error}") from error
    if not isinstance(options, dict):
        raise ForewordError(f"{path} must hold options by name, not a {type(options).__name__}")
    method = options.get("method")
    if isinstance(method, dict):
        fields = {f"method.{name}": value for name, value in method.items() if name != "method"}
        options = options | {"method": method.get("method", "")} | fields
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ForewordError(f"{where} is not valid YAML: {_one_line(error)}") from error


def _cut(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The last value of `option` among the words, and the words without it."""
    value, rest, following = None, [], iter(words)
    for word in following:
        if word == option:
            value = next(following, None)
            if value is None:
                raise ForewordError(f"{option} needs a value")
        elif word.startswith(f"{option}="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest


def _split(words: list[str], prefix: str) -> tuple[list[str], list[str]]:
    """Words of the options that begin with `prefix`, as options without it, with their values; and the other words."""
    own: list[str] = []
    rest: list[str] = []
    following = iter(words)
    for word in following:
        if not word.startswith(prefix):
            rest.append(word)
            continue
        own.append("--" + word.removeprefix(prefix))
        if "=" not in word:
            own += [value for value in [next(following, None)] if value is not None]
    return own, rest


def _with_flag_values(parser: ArgumentParser, words: list[str]) -> list[str]:
    """Give a boolean option without a value the value true."""
    flags = {
        option
        for action in parser._actions
        if getattr(action, "_typehint", None) is bool
        for option in action.option_strings
    }
    spelled = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue="--"):
        spelled.append(f"{word}=true" if word in flags and following not in ("true", "false") else word)
    return spelled


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
