"""From a user's keywords to a call's text (see _engine.py): names become the header's numbers, defaults stay out.

Values are checked by the library, which names them in C's terms; here are checked only those that have no number there.
"""

from __future__ import annotations

from collections.abc import Iterable

from . import _abi

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def number_of(keyword: str, value: str, names: dict[str, int]) -> int:
    """The number of a name; ValueError lists the names there are."""
    if value not in names:
        raise ValueError(f"{keyword}: {value!r}; must be one of {', '.join(map(repr, names))}")
    return names[value]


def bytes_of(memory_budget: int | str | None, keyword: str = "memory_budget") -> int:
    """Bytes of a budget such as 1 << 29, '512MiB' or '1.5 GiB'; None is 0, no limit."""
    if memory_budget is None:
        return 0
    if isinstance(memory_budget, str):
        text = memory_budget.strip()
        digits = text.rstrip("BKMGTi").strip()
        unit = text[len(digits) :].strip()
        try:
            size = int(float(digits) * _UNITS[unit])
        except (KeyError, ValueError):
            raise ValueError(
                f"{keyword}: {memory_budget!r}; must be bytes, or a text in B, KiB, MiB, GiB or TiB"
            ) from None
    else:
        size = int(memory_budget)
    if size <= 0:
        raise ValueError(f"{keyword}: {memory_budget!r}; must be above 0, or None for no limit")
    return size


def settings(
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    smoothing: str = "uniform",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    on_empty: str = "nan",
    memory_budget: int | str | None = None,
    filter_eps: float = 0.0,
    filter_seed: int = 0,
    most_kept_rows: int | None = None,
    more: Iterable[tuple[str, object]] = (),
) -> str:
    """The settings of a call's text. `more`: further fields of ll_options or ll_problem, as they are."""
    budget = bytes_of(memory_budget)
    items = [
        ("reduction", number_of("reduction", reduction, _abi.REDUCTION)),
        ("on_empty", number_of("on_empty", on_empty, _abi.ON_EMPTY)),
    ]
    if ignore_index is not None and ignore_index != -100:
        items.append(("ignore_index", int(ignore_index)))
    text = " ".join([f"{name}={value}" for name, value in items])
    if label_smoothing != 0.0:
        text += f" label_smoothing={float(label_smoothing)!r}"
    if smoothing != "uniform":
        text += f" smoothing={number_of('smoothing', smoothing, _abi.SMOOTHING)}"
    if z_loss != 0.0:
        text += f" z_loss={float(z_loss)!r}"
    if softcap is not None:
        text += f" softcap={positive('softcap', softcap)!r}"
    if logit_scale != 1.0:
        text += f" logit_scale={positive('logit_scale', logit_scale)!r}"
    if temperature != 1.0:
        text += f" temperature={positive('temperature', temperature)!r}"
    if budget > 0:
        text += f" memory_budget={budget}"
    if filter_eps != 0.0:
        text += f" filter={float(filter_eps)!r}"
        if filter_seed != 0:
            text += f" filter_seed={int(filter_seed)}"
    if most_kept_rows is not None:
        if most_kept_rows < 1:
            raise ValueError(f"most_kept_rows: {most_kept_rows}; must be at least 1, or None where it is not known")
        text += f" most_kept_rows={int(most_kept_rows)}"
    for name, value in more:
        text += f" {name}={value}"
    return text


def positive(keyword: str, value: float) -> float:
    """A number above 0; in the C ABI 0 would mean the default."""
    value = float(value)
    if not value > 0.0:
        raise ValueError(f"{keyword}: {value!r}; must be above 0")
    return value


def call_text(kind: int, call: int, settings_text: str, inputs: Iterable[str], outputs: Iterable[str]) -> str:
    """Joins the parts of a call's text."""
    return f"kind={kind} call={call} {settings_text}|{' '.join(inputs)}|{' '.join(outputs)}"
