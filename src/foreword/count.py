"""How many parameters a method has on a model: by its formula, and by counting; and the size that fits a budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedModel

from .errors import ForewordError
from .model.host import host_of
from .model.layout import Layout
from .model.peft_part import PeftPart
from .model.weights import parameters_of
from .sources.text import Blank
from .space import Count, Method, methods, resolve

LARGEST = 2**20  # no method is sized above it


@dataclass(frozen=True)
class Row:
    """One method on one model.

    Attributes:
        method: its configuration.
        formula, counted: its parameters by formula and by counting; None where the model refuses it.
        share: trainable parameters over the model's own.
        refusal: why the model refuses it.
    """

    method: Method
    formula: Count | None = None
    counted: Count | None = None
    share: float | None = None
    refusal: str | None = None


def formula(method: Method | str, layout: Layout) -> Count:
    """Trainable and stored parameters of a method, or a registry name with its defaults, on a surveyed model.

    Closed formulas over the shapes of the model, written apart from the modules that they count. Raises
    `ForewordError` where the model can't take the method.
    """
    return resolve(method).count(layout)


def counted(method: Method | str, model: PreTrainedModel) -> Count:
    """The same by building the method's modules for `model` and counting them. The model is as before.

    Raises `ForewordError` where the model can't take the method.
    """
    host = host_of(model)
    active = host.active
    host.activate(None)
    installed: list[PeftPart] = []
    try:
        parts = resolve(method).parts(host.layout, Blank(model, host.layout))
        for index, part in enumerate(parts):
            if isinstance(part, PeftPart):  # its parameters are made on the model
                installed.append(part)
                part.install(host, "foreword-count", index, model.dtype)
        return Count(
            trainable=sum(parameter.numel() for part in parts for parameter in part.trainable()),
            stored=sum(part.num_stored() for part in parts),
        )
    finally:
        for part in installed:
            part.remove(host, "foreword-count")
        host.activate(active)
        host.leave_if_empty()


def table(model: PreTrainedModel, only: Iterable[Method | str] | None = None) -> list[Row]:
    """Every method of the registry at its defaults, or those of `only`, on `model`: by formula and by counting."""
    total = num_own(model)
    rows = []
    for chosen in methods() if only is None else only:
        method = resolve(chosen)
        host = host_of(model)
        try:
            by_formula = formula(method, host.layout)
            by_counting = counted(method, model)
            rows.append(Row(method, by_formula, by_counting, by_counting.trainable / total))
        except ForewordError as refusal:
            rows.append(Row(method, refusal=str(refusal)))
        finally:
            host.leave_if_empty()
    return rows


def num_own(model: PreTrainedModel) -> int:
    """Parameters of the model itself, tied ones once, without any adapter's."""
    return sum(parameter.numel() for parameter in parameters_of(model).values())


def fit_budget(chosen: Method | str, model: PreTrainedModel, budget: int) -> Method:
    """A method, or a registry name with its defaults, at the largest size of at most `budget` trainable parameters.

    Its size field (`Method.size`: length, bottleneck or r) is chosen, the others stay as they are; in a composition
    of several methods the sizes of its parts keep their proportion.

    Raises:
        ForewordError: an unknown name, a model that can't take the method, or a budget below its smallest size.
    """
    method = resolve(chosen)
    host = host_of(model)
    try:
        layout = host.layout
        least = method.least_size

        def cost(size: int) -> int:
            return method.at_size(size).count(layout).trainable

        smallest = method.count(layout).trainable if method.size is None else cost(least)
        if smallest > budget:
            raise ForewordError(
                f"{method.name} trains at least {smallest:,} parameters on this model, more than {budget:,}"
            )
        if method.size is None:
            return method
        fits, exceeds = least, 2 * least
        while exceeds < LARGEST and cost(exceeds) <= budget:
            fits, exceeds = exceeds, 2 * exceeds
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            fits, exceeds = (middle, exceeds) if cost(middle) <= budget else (fits, middle)
        return method.at_size(fits)
    finally:
        host.leave_if_empty()
