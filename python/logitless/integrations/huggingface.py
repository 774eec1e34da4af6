"""patch(model): a Hugging Face causal LM computes its loss without logits; unpatch(model) takes it back.

The model's own forward still runs, so that caches, auxiliary losses, output class and all else stay its own; only the
hidden states [B, T, H] are caught at the head's door, which gets none of them, and the loss of head.weight [V, H] is
one call of linear_cross_entropy. How the model gets from the head's products to logits (scale, softcap) is read from
its configuration and never believed: a probe of a few tokens compares, and patch() refuses on a mismatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import math
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ..pytorch import linear_cross_entropy

__all__ = ["LogitsNotComputed", "UnsupportedModel", "patch", "unpatch"]

# Names under which configurations or models keep a factor of the logits. Whether a model multiplies or divides by it
# differs between models that share the name (Granite and HyperCLOVAX), so both are candidates for the probe.
_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier", "logits_scale")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "logit_softcap", "output_softcap")
_AUX_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")

_TOKENS = 8  # of the probe
_COLUMNS = 4096  # of the head that the probe compares, so that no fp64 copy of the whole head is made
_REACH = (1.0, 10.0, 100.0, 1000.0)  # largest logits of the second probe's rows: no softcap hides from all of them


class UnsupportedModel(ValueError):
    """patch() or a patched forward refuses a model, a head or a way of calling; the text says why and what to do."""


class LogitsNotComputed(AttributeError, RuntimeError):
    """Someone reads the logits of a patched forward that computed a loss. An AttributeError too, so that hasattr(),
    with which libraries look for tensors in outputs, says no instead of failing."""


_NO_LOGITS = (
    "logitless: this forward computed the loss without logits. Call the model with logits=True to have both, without "
    "labels to have logits alone, or patch(model, eval_logits=True) for an evaluation that reads logits."
)


class _SaysWhy(type):
    """Errors of other libraries name the type of what they cannot use; this one names the remedy."""

    def __repr__(cls) -> str:
        return "<no logits: logitless.patch(model, eval_logits=True) keeps them in evaluation>"


class _NoLogits(metaclass=_SaysWhy):
    """Stands where the logits would be; whatever reads it raises LogitsNotComputed."""

    def __getattr__(self, name: str) -> Any:
        raise LogitsNotComputed(_NO_LOGITS)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise LogitsNotComputed(_NO_LOGITS)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LogitsNotComputed(_NO_LOGITS)

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __repr__(self) -> str:
        return "<logits were not computed: logitless.patch>"

    def __reduce__(self) -> str:
        return "NO_LOGITS"  # copies and pickles are this one object


NO_LOGITS = _NoLogits()


class _Transform(NamedTuple):
    """z = softcap tanh(scale (X W^T + b) / softcap), or without softcap scale (X W^T + b)."""

    scale: float
    softcap: float | None


@dataclasses.dataclass
class _Patch:
    """What patch() keeps on a model."""

    names: tuple[str, ...]  # of forward's parameters, self left out
    own: Any  # the forward that lay on the instance, or None where the class' serves
    transform: _Transform
    on_empty: str = "nan"
    eval_logits: bool = False
    memory_budget: int | str | None = None
    armed: bool = False
    seen: int = 0  # calls of the head while armed
    hidden: Tensor | None = None
    factors: Tensor | None = None  # the probe's: [T], hidden states are multiplied by them and go on to the head
    keep: bool = False  # the probe's: hidden states go on to the head as they are
    head: Any = None
    hook: Any = None
    warned: bool = False

    def watch(self, head: nn.Module) -> None:
        """Hooks the head; a model whose head was replaced (resized embeddings) has its new one hooked."""
        if self.head is not head:
            if self.hook is not None:
                self.hook.remove()
            self.head, self.hook = head, head.register_forward_pre_hook(self.catch)

    def catch(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Forward pre-hook of the head: while armed it takes the hidden states and lets none through."""
        if not self.armed or not args:
            return None
        hidden: Tensor = args[0]
        if self.factors is not None:
            hidden = hidden * self.factors[:, None].to(hidden.dtype)
        self.seen, self.hidden = self.seen + 1, hidden
        return (hidden if self.keep else hidden[..., :0, :], *args[1:])

    def original(self, model: nn.Module, **kwargs: Any) -> Any:
        """Runs the forward that patch() found."""
        return self.own(**kwargs) if self.own is not None else type(model).forward(model, **kwargs)


def patch(
    model: Any,
    *,
    memory_budget: int | str | None = None,
    on_empty: str = "nan",
    eval_logits: bool = False,
    logit_scale: float | None = None,
    softcap: float | None = None,
) -> Any:
    """Makes a transformers causal LM compute its loss without logits [B, T, V], in place; returns the model.

    Afterwards model(..., labels=labels) gives the same loss and gradients as before (ForCausalLMLoss: labels are padded
    and shifted inside, shift_labels are taken as given, num_items_in_batch may be a number or a tensor, ignore_index),
    with auxiliary losses of mixtures of experts, in the model's own output class; its `logits` raise LogitsNotComputed
    when read. Without labels (generate()), with logits_to_keep, or with logits=True the original forward runs.

    Args:
        model: a PreTrainedModel with get_output_embeddings(), a PEFT model around one (adapters anywhere but on the
            head), or a Trainer, whose model is patched and whose options are checked. Patch before torch.compile,
            fully_shard or accelerate's prepare. Weights float32, bfloat16 or float16.
        memory_budget: workspace of each loss, bytes or '512MiB'.
        on_empty: loss of a batch without any label: "nan" (as PyTorch), or "zero" with gradients of zero.
        eval_logits: keep the original forward in eval mode, for evaluations that read logits.
        logit_scale, softcap: the transform of the logits where the configuration does not tell it; probed like any.

    Raises:
        UnsupportedModel (a ValueError): the model's logits are not what its configuration tells (the ratio is in the
            text), its loss is not ForCausalLMLoss, the head is quantised or carries an adapter, a label smoother
            computes from logits, and the like.

    Source: transformers.loss.loss_utils.ForCausalLMLoss; each model's forward, by the probe.
    """
    trainer = model if hasattr(model, "compute_loss") and hasattr(model, "label_smoother") else None
    if trainer is not None:
        _check_trainer(trainer, eval_logits)
        model = trainer.model
    given = model
    model = _unwrapped(model)
    if isinstance(getattr(model, "_logitless", None), _Patch):
        raise UnsupportedModel(f"{type(model).__name__} is patched already; logitless.unpatch(model) first")
    _check_model(model)
    head = _head(model)
    parameters = list(inspect.signature(type(model).forward).parameters)
    state = _Patch(tuple(parameters[1:]), model.__dict__.get("forward"), _Transform(1.0, None))
    state.on_empty = on_empty
    state.watch(head)
    model._logitless = state
    try:
        state.transform = _probe(model, head, state, logit_scale, softcap)
        model.forward = types.MethodType(_forward_of(type(model)), model)
        _compare_losses(model, state)
    except BaseException:
        unpatch(model)
        raise
    state.eval_logits, state.memory_budget = eval_logits, memory_budget  # the probe shall meet neither
    return trainer if trainer is not None else given


def unpatch(model: Any) -> Any:
    """Gives a patched model its forward back; returns the model. Nothing happens to one that is not patched."""
    given = model
    model = _unwrapped(model.model if hasattr(model, "compute_loss") and hasattr(model, "label_smoother") else model)
    state = getattr(model, "_logitless", None)
    if not isinstance(state, _Patch):
        return given
    state.hook.remove()
    del model._logitless
    forward = model.__dict__.get("forward")
    # Where someone has wrapped the patched forward since (accelerate's autocast), the wrapper stays: with no state on
    # the model the patched forward inside is the original one.
    if forward is not None and getattr(getattr(forward, "__func__", None), "_logitless_own", None) is True:
        if state.own is None:
            del model.forward
        else:
            model.forward = state.own
    return given


def _forward_of(cls: type) -> Any:
    """The patched forward of a model class; it keeps the signature, which Trainer and generate() inspect."""
    original = cls.forward  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, "_logitless", None)
        if not isinstance(state, _Patch):
            return original(self, *args, **kwargs)
        return _forward(self, state, args, kwargs)

    # Not functools.wraps: accelerate follows __wrapped__ when it takes its autocast off, and would take ours off too.
    forward.__name__, forward.__qualname__ = original.__name__, original.__qualname__
    forward.__doc__, forward.__module__ = original.__doc__, original.__module__
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    forward._logitless_own = True  # type: ignore[attr-defined]
    return forward


def _forward(model: Any, state: _Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The original forward without a loss, its output with a loss of its hidden states."""
    if args:
        kwargs = {**dict(zip(state.names, args, strict=False)), **kwargs}
    wanted = kwargs.pop("logits", None)
    labels = kwargs.get("labels")
    kept = kwargs.get("logits_to_keep", 0)
    some = not isinstance(kept, int) or kept != 0
    if labels is None or wanted or some or (state.eval_logits and not model.training):
        if labels is None:
            _check_no_labels(model, state, kwargs)
        return state.original(model, **kwargs)
    if model.loss_function is not ForCausalLMLoss:
        raise UnsupportedModel(_loss_text(model))
    head = _head(model)
    del kwargs["labels"]
    normalizer = kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    targets = kwargs.pop("shift_labels", None)
    return_dict = kwargs.pop("return_dict", None)
    state.watch(head)
    output, hidden = _run(model, state, kwargs)
    if targets is None:
        # Labels move, not hidden states: the last position of each sequence has no label and costs nothing.
        targets = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        targets.to(hidden.device).reshape(hidden.shape[:-1]),
        linear_bias=head.bias,
        ignore_index=ignore_index,
        logit_scale=state.transform.scale,
        softcap=state.transform.softcap,
        normalizer=normalizer.to(hidden.device) if isinstance(normalizer, Tensor) else normalizer,
        on_empty=state.on_empty,
        memory_budget=state.memory_budget,
    )
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None:
        loss = loss + _aux_coefficient(model) * aux_loss.to(loss.device)
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    output = type(output)(**{**values, "loss": loss, "logits": NO_LOGITS})
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    return output if return_dict else output.to_tuple()


def _run(model: Any, state: _Patch, kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
    """The original forward; its output and the hidden states that reached its head."""
    if state.armed:
        # Another call's hidden states would meet this one's labels.
        raise UnsupportedModel(
            f"{type(model).__name__}: a patched forward runs in two threads at once (nn.DataParallel does so); use "
            "DistributedDataParallel, or a copy of the model for each thread"
        )
    state.armed, state.seen, state.hidden = True, 0, None
    try:
        output = state.original(model, **kwargs, return_dict=True)
        hidden, seen = state.hidden, state.seen
    finally:
        state.armed, state.hidden = False, None
    if hidden is None or seen != 1:
        raise UnsupportedModel(
            f"{type(model).__name__}.forward calls get_output_embeddings() {seen} times; patch() needs one call"
        )
    if not dataclasses.is_dataclass(output) or not hasattr(output, "logits"):
        raise UnsupportedModel(
            f"{type(model).__name__}.forward gives a {type(output).__name__}; it must give a ModelOutput with logits"
        )
    return output, hidden


def _check_no_labels(model: Any, state: _Patch, kwargs: dict[str, Any]) -> None:
    """Trainer's label smoother and compute_loss_func take the labels away and leave the count of them."""
    if kwargs.get("num_items_in_batch") is not None:
        raise UnsupportedModel(
            "num_items_in_batch came without labels: Trainer's label_smoothing_factor or compute_loss_func computes "
            "the loss from logits, which this model is patched not to hold. Set label_smoothing_factor=0 and no "
            "compute_loss_func, or logitless.unpatch(model)"
        )
    if model.training and torch.is_grad_enabled() and not state.warned and not torch.compiler.is_compiling():
        state.warned = True
        warnings.warn(
            "logitless: a patched model is trained without labels, so its logits are computed in full; pass labels, or "
            "take the loss from hidden states with logitless.linear_cross_entropy",
            stacklevel=4,
        )


def _check_trainer(trainer: Any, eval_logits: bool) -> None:
    if getattr(trainer, "compute_metrics", None) is not None and not eval_logits:
        raise UnsupportedModel(
            "compute_metrics: an evaluation with it reads logits; logitless.patch(trainer, eval_logits=True) keeps "
            "them in eval mode"
        )
    for name, reason in (
        ("label_smoother", "label_smoothing_factor: Trainer's smoother computes from logits; set it to 0"),
        ("compute_loss_func", "compute_loss_func: it computes from logits; leave it out"),
    ):
        if getattr(trainer, name, None) is not None:
            raise UnsupportedModel(f"{reason}, or train without logitless.patch")


def _unwrapped(model: Any) -> Any:
    """The model inside PEFT's wrapper; other wrappers are refused, since patching must come before them."""
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        model = model.get_base_model()
    for attribute, wrapper in (("_orig_mod", "torch.compile"), ("module", "a data-parallel wrapper")):
        if attribute in getattr(model, "_modules", {}):
            raise UnsupportedModel(f"model: {type(model).__name__}; patch the model before {wrapper}")
    return model


def _check_model(model: Any) -> None:
    """What can be said without running it."""
    name = type(model).__name__
    if not isinstance(model, transformers.PreTrainedModel):
        raise UnsupportedModel(
            f"model: {name}; must be a transformers model with a language-modelling head; for others call "
            "logitless.linear_cross_entropy(hidden, lm_head.weight, labels, shift=True)"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models do not shift labels as causal ones do")
    if model.loss_function is not ForCausalLMLoss:
        raise UnsupportedModel(_loss_text(model))
    if "labels" not in inspect.signature(type(model).forward).parameters:
        raise UnsupportedModel(f"{name}.forward takes no labels; it computes no loss that patch() could replace")
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise UnsupportedModel(f"{name}: parameters on the meta device cannot be probed; patch after loading weights")


def _loss_text(model: Any) -> str:
    found = getattr(model.loss_function, "__name__", repr(model.loss_function))
    return f"{type(model).__name__}: loss_function is {found}; patch() replaces ForCausalLMLoss only"


def _head(model: Any) -> nn.Linear:
    """The output embeddings, if they are a plain nn.Linear; their weight is multiplied as it is."""
    head: nn.Linear | None = model.get_output_embeddings()
    name = type(head).__name__
    if head is None:
        raise UnsupportedModel(f"{type(model).__name__}: get_output_embeddings() is None; there is no head to patch")
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        raise UnsupportedModel(
            f"lm_head: {name}, an adapter (LoRA and the like) on the head: its weight is not the matrix that "
            "multiplies. Leave the head out of target_modules and modules_to_save, or merge the adapter"
        )
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in head.__dict__
    if not plain or not head.weight.is_floating_point() or head.weight.element_size() < 2:
        dtype = getattr(getattr(head, "weight", None), "dtype", None)
        raise UnsupportedModel(
            f"lm_head: {name} with weight {dtype}; must be a plain nn.Linear of float32, bfloat16 or float16. Keep a "
            "quantised head in 16 bits (llm_int8_skip_modules=['lm_head'])"
        )
    if hasattr(head.weight, "ds_id"):
        raise UnsupportedModel("lm_head: DeepSpeed ZeRO-3 has partitioned the weight; use ZeRO-2, or FSDP2 around it")
    return head


def _aux_coefficient(model: Any) -> float:
    config = model.config.get_text_config()
    for owner, name in itertools.product((model, config, model.config), _AUX_COEFFICIENTS):
        value = getattr(owner, name, None)
        if value is not None:
            return float(value)
    return 0.0


def _numbers(model: Any, names: tuple[str, ...]) -> Iterator[tuple[str, float]]:
    config = model.config.get_text_config()
    for name, owner in itertools.product(names, (config, model)):
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0.0 and math.isfinite(value):
            yield name, float(value)


def _candidates(model: Any, scale: float | None, softcap: float | None) -> list[_Transform]:
    """Transforms that the configuration may mean, the likeliest first."""
    config = model.config.get_text_config()
    scales = [1.0] if scale is None else [float(scale)]
    caps: list[float | None] = [None] if softcap is None else [float(softcap)]
    if scale is None:
        for name, value in _numbers(model, _SCALES):
            scales += [1.0 / value, value] if name == "logits_scaling" else [value, 1.0 / value]
        if getattr(config, "dim_model_base", None):  # MiniCPM: hidden states divided by hidden_size / dim_model_base
            scales.append(config.dim_model_base / config.hidden_size)
    if softcap is None:
        caps += [value for _, value in _numbers(model, _SOFTCAPS)]
    # What the configuration says comes before what it leaves out; a softcap inside the scale is one outside it.
    found = [
        _Transform(one, cap * factor if cap is not None else None)
        for one, cap in itertools.product(scales[1:] + scales[:1], caps[1:] + caps[:1])
        for factor in ((1.0, one) if cap is not None and one != 1.0 else (1.0,))
    ]
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Eval mode without gradients; every module's attributes and the random state come back.

    All attributes, not the mode alone: BigBird, for one, exchanges its attention modules on a short sequence.
    Without autocast, unless the model needs it: a head of float32 over a body of 16 bits.
    """
    device = next(model.parameters()).device
    body = model.get_input_embeddings().weight.dtype
    mixed = body.itemsize < model.get_output_embeddings().weight.dtype.itemsize
    devices = [device] if device.type not in ("cpu", "meta") else []
    tables = ("_modules", "_buffers", "_parameters")
    saved = [(each, dict(each.__dict__), [dict(each.__dict__[name]) for name in tables]) for each in model.modules()]
    try:
        with (
            torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"),
            torch.no_grad(),
            torch.autocast(device.type, dtype=body if mixed else None, enabled=mixed),
        ):
            model.eval()
            yield
    finally:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in zip(tables, contents, strict=True):
                module.__dict__[name].clear()
                module.__dict__[name].update(content)


def _probe_inputs(model: Any) -> dict[str, Any]:
    """Token ids [1, 8] spread over the vocabulary, none of them special, as their own labels, one of them ignored."""
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config()):
        for name, value in config.to_dict().items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, (list, tuple)) else [value])
    embeddings = model.get_input_embeddings().weight
    vocab = min(embeddings.shape[0], model.config.get_text_config().vocab_size)
    spread = range(1, vocab, max(1, vocab // (2 * _TOKENS)))
    free = [token for token in (*spread, *range(min(vocab, 64))) if token not in special] or [0]
    tokens = list(itertools.islice(itertools.cycle(free), _TOKENS))
    ids = torch.tensor([tokens], device=embeddings.device)
    labels = ids.clone()
    labels[0, _TOKENS // 2] = -100
    return {"input_ids": ids, "labels": labels}


def _probe_run(model: Any, state: _Patch, inputs: dict[str, Any], factors: Tensor | None = None) -> tuple[Any, Tensor]:
    """The original forward with its logits; with factors [T] of hidden states multiplied by them."""
    state.keep, state.factors = True, factors
    try:
        return _run(model, state, inputs)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__}: the probe of {_TOKENS} tokens failed in the original forward: {error}"
        ) from error
    finally:
        state.keep, state.factors = False, None


def _raw(hidden: Tensor, head: nn.Linear) -> Tensor:
    """X W^T + b in float64 at up to 4096 columns of the head, [T, columns]."""
    columns = _columns(head)
    z = hidden.reshape(-1, hidden.shape[-1]).double() @ head.weight[columns].double().T
    return z if head.bias is None else z + head.bias[columns].double()


def _columns(head: nn.Linear) -> slice:
    return slice(None, None, -(-head.weight.shape[0] // _COLUMNS))


def _roundoff(model: nn.Module, dtype: torch.dtype) -> float:
    """Relative rounding of the original's logits."""
    eps = torch.finfo(dtype).eps
    on_gpu = next(model.parameters()).device.type != "cpu"
    return max(eps, 2.0**-10) if on_gpu and torch.get_float32_matmul_precision() != "highest" else eps


def _probe(model: Any, head: nn.Linear, state: _Patch, scale: float | None, softcap: float | None) -> _Transform:
    """The transform between head and logits, from the candidates that the configuration gives; refuses if none fits.

    Two runs of the original forward: as it is, and with hidden states multiplied so that the head's products reach 1,
    10, 100 and 1000, where a softcap or anything else that is not linear shows, however small the model's logits are.
    """
    inputs = _probe_inputs(model)
    with _undisturbed(model):
        output, hidden = _probe_run(model, state, inputs)
        plain = _raw(hidden, head)
        if plain.shape[0] != _TOKENS or output.logits.numel() != _TOKENS * head.weight.shape[0]:
            raise UnsupportedModel(
                f"{type(model).__name__}: {_TOKENS} tokens gave hidden states {list(hidden.shape)} and logits "
                f"{list(output.logits.shape)}; patch() needs one row of logits for each token"
            )
        tops = plain.abs().amax(-1)
        if not (torch.isfinite(tops).all() and (tops > 0.0).all()):
            raise UnsupportedModel("lm_head: the probe's logits are all 0 or not finite; patch after loading weights")
        reach = torch.tensor(_REACH, dtype=torch.float64, device=tops.device).repeat(_TOKENS // len(_REACH))
        room = torch.finfo(hidden.dtype).max / 16.0 / hidden.reshape(_TOKENS, -1).double().abs().amax(-1)
        factors = torch.exp2(torch.floor(torch.log2(torch.minimum(reach / tops, room))))
        more = {name: value for name, value in inputs.items() if name != "labels"}
        far_output, far_hidden = _probe_run(model, state, more, factors)
        rows = torch.cat([plain, _raw(far_hidden, head)])
        columns = _columns(head)
        both = [each.logits.reshape(_TOKENS, -1)[:, columns] for each in (output, far_output)]
        logits = torch.cat(both).double()
        eps = _roundoff(model, output.logits.dtype)
        # What the products may lose: their dtype's rounding in a few steps, and fp32 sums over H.
        norms = torch.cat([hidden, far_hidden]).reshape(2 * _TOKENS, -1).double().norm(dim=-1)
        sums = torch.finfo(torch.float32).eps * norms * head.weight[columns].double().norm(dim=-1).max()
        found: list[tuple[_Transform, float]] = []
        for transform in _candidates(model, scale, softcap):
            z = rows * transform.scale
            if transform.softcap is not None:
                z = torch.tanh(z / transform.softcap) * transform.softcap
            near, original = z[:_TOKENS], logits[:_TOKENS]
            ratio = float((original * near).sum() / (near * near).sum())
            bound = 8.0 * (eps * logits.abs().amax(-1) + sums * transform.scale)
            if bool(((z - logits).abs().amax(-1) <= bound).all()) and abs(ratio - 1.0) <= max(eps / 2.0, 1e-5):
                return transform
            found.append((transform, ratio))
    tried = "; ".join(f"{_text(transform)}: ratio {ratio:.6g}" for transform, ratio in found)
    raise UnsupportedModel(
        f"{type(model).__name__}: its logits are not what its configuration tells. Ratio of the original's logits to "
        f"the inferred ones on {_TOKENS} tokens, by transform: {tried}. A constant ratio r is a scale: "
        "patch(model, logit_scale=r); anything else needs the model's own head: logitless.linear_cross_entropy"
    )


def _text(transform: _Transform) -> str:
    cap = "" if transform.softcap is None else f", softcap {transform.softcap:g}"
    return f"logit_scale {transform.scale:g}{cap}"


def _compare_losses(model: Any, state: _Patch) -> None:
    """The patched loss against the original's on the probe, with the auxiliary loss where there is one."""
    runs: list[dict[str, Any]] = [{}]
    if "output_router_logits" in state.names:
        runs.append({"output_router_logits": True})
    inputs = _probe_inputs(model)
    with _undisturbed(model):
        for more in runs:
            try:
                output, _ = _probe_run(model, state, {**inputs, **more})
            except UnsupportedModel:
                if more:
                    continue  # an original without routers to report on cannot be asked for them later either
                raise
            loss, original = float(model(**inputs, **more).loss), float(output.loss)
            eps = _roundoff(model, output.logits.dtype)
            bound = 1e-5 * abs(original) + 4.0 * eps * float(output.logits.abs().max())
            if not abs(loss - original) <= bound:
                raise UnsupportedModel(
                    f"{type(model).__name__}: loss {original:.7g} of the original forward, {loss:.7g} patched"
                    f"{' with router logits' if more else ''} (ratio {original / loss:.6g}): it is not ForCausalLMLoss "
                    "of the logits, with labels shifted by one and nothing else added"
                )
