"""Problems from models of Hugging Face and the batches of their loaders.

Nothing of transformers is imported. A model takes the entries of a batch as keyword arguments and
returns an object with ``logits``; models of other packages that do so work, too.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.evaluation import IsolatedModules
from curvlinops.autodiff.model import check_modules
from curvlinops.autodiff.overrides import Overrides
from curvlinops.autodiff.overrides.writes import Protected
from curvlinops.autodiff.parameters import named_parameters
from curvlinops.losses import wrap_loss
from curvlinops.support.pytree import move
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import modules_of
from curvlinops.team.shards import shards_of
from curvlinops.team.team import team_of

#: The tasks, with the ends of the names of their model classes.
_TASKS = {
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
    "seq2seq-lm": ("ForConditionalGeneration",),
    "sequence-classification": (
        "ForSequenceClassification",
        "ForImageClassification",
        "ForAudioClassification",
        "ForVideoClassification",
    ),
    "token-classification": ("ForTokenClassification",),
}

#: The losses of classifiers by ``config.problem_type``.
_PROBLEM_TYPES = {
    "regression": nn.MSELoss,
    "single_label_classification": nn.CrossEntropyLoss,
    "multi_label_classification": nn.BCEWithLogitsLoss,
}

#: What a user does with a model of another kind, for messages.
_WRAPPER = (
    "write the wrapper: model_func is a Module whose forward(self, X) returns "
    "self.model(**X).logits with classes on axis 1, data are pairs (X, labels), and the labels of "
    "a causal language model are shifted by one position."
)

#: Labels with this value are ignored.
_IGNORED = -100

#: What operators are constructed from, see ``problem``.
Problem = tuple[nn.Module, nn.Module, dict[str, nn.Parameter], Iterable[tuple[dict, Tensor]]]


def problem(model: nn.Module, loader: Iterable[Mapping], task: str | None = None) -> Problem:
    """Return model, loss, parameters and data of a Hugging Face model, for every data operator.

    ``HessianLinearOperator(*problem(model, loader))`` is the Hessian of the model's own loss,
    ``model(**batch).loss``, as the mean over all tokens (or samples) of all batches.

    Tasks, by the ends of the names of the model's classes, with V tokens, C classes, and T
    positions:

    - ``"causal-lm"`` (``ForCausalLM``, ``LMHeadModel``): output ``[N, V, T - 1]``, target
      ``[N, T - 1]``, the labels after the first.
    - ``"masked-lm"`` (``ForMaskedLM``), ``"seq2seq-lm"`` (``ForConditionalGeneration`` with an
      encoder and a decoder), ``"token-classification"`` (``ForTokenClassification``): output
      ``[N, V or C, T]``, target ``[N, T]``.
    - ``"sequence-classification"`` (``ForSequenceClassification``, ``ForImageClassification``,
      ``ForAudioClassification``, ``ForVideoClassification``): output ``[N, C]``, target ``[N]`` for
      one label, ``[N, C]`` for several labels and for regression.

    The loss is ``CrossEntropyLoss``. For classifiers, ``config.problem_type`` also chooses
    ``BCEWithLogitsLoss`` (several labels) or ``MSELoss`` (regression). If it is ``None``, the type
    follows from the number of outputs and the dtype of the labels, as in the models themselves.

    The first batch of the loader is evaluated once, without gradients, to compare this loss with
    the model's own. The model is left as it is: call ``model.eval()`` to switch dropout off.

    Args:
        model: The model, perhaps wrapped by ``torch.compile``, ``DistributedDataParallel`` or
            ``DataParallel``. It is called with the entries of a batch as keyword arguments, and
            with ``use_cache=False`` if it takes that.
        loader: An iterable over dictionaries or ``BatchEncoding``, the same in each pass. Batches
            are those of ``model(**batch)``. Labels are the entry ``"labels"`` or ``"label"``; -100
            is ignored. Batches of a causal language model without labels get ``input_ids`` as
            labels, with -100 at padding, where ``attention_mask`` is zero.
        task: The task. Default: by the name of the model's class.

    Returns:
        ``(model_func, loss_func, params, data)``. ``model_func`` is a module that returns logits
        with classes on axis 1. ``params`` has the parameters that require gradients, such as
        adapters, by their own names. ``data`` streams the loader as pairs;
        it has the loader's length, if there is one. X is the batch without its labels. Models of
        sequence to sequence make their decoder's input from the labels, so that X has them, too.

    Raises:
        TypeError: If the model is no Module, ``FullyShardedDataParallel``, or returns no logits; if
            the loader yields no dictionaries.
        ValueError: If the task is unknown, or not that of the model, whose own loss is another one
            or has further terms; if the model writes to a parameter; if no parameter requires
            gradients; if batches have no labels, or there is no batch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a Module, got {type(model).__name__}.")
    if isinstance(loader, Iterator):
        raise ValueError(
            f"loader is a one-shot iterator ({type(loader).__name__}), exhausted after one pass. "
            "Pass a DataLoader or a list of batches."
        )
    _, model = named_parameters(model)  # without wrappers
    check_modules(model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT
    task = _task_of(base, task)
    model_func = Logits(model, task, {"use_cache": False} if _takes(base, "use_cache") else {})
    params = {n: p for n, p in model_func.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError(
            f"No parameter of {type(base).__name__} requires gradients. Call requires_grad_() on "
            "the parameters of the matrix."
        )
    loss_func = _loss_of(model_func, base, loader)
    return model_func, loss_func, params, Pairs(loader, task, loss_func)


class Logits(nn.Module):
    """A model as a function from a batch to its logits, with classes on axis 1.

    ``options`` are further keyword arguments of each call.
    """

    def __init__(self, model: nn.Module, task: str, options: Mapping[str, Any]):
        super().__init__()
        self.wrapped, self.task, self.options = model, task, options

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True):
        """Yield the modules by the model's own names, so that parameters have these, too.

        This module and the model have the empty name.
        """
        yield prefix, self
        yield from self.wrapped.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, so that its modules are found by their names."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

    def forward(self, X: Mapping[str, Any]) -> Tensor:
        """Return the logits ``[N, C]``, or those of all positions ``[N, C, T]``."""
        return self.arranged(self.call(X))

    def call(self, X: Mapping[str, Any]) -> Any:
        """Return the model's own output."""
        return self.wrapped(**X, **self.options)

    def attention_masks(self, X: Mapping[str, Any]) -> list[Tensor]:
        """Return the masks ``[N, T]`` of the sequences in a batch, zero at padding, for KFAC."""
        masks = [X.get("attention_mask"), X.get("decoder_attention_mask")]
        if masks[1] is None and "labels" in X:  # the padding of a decoder has no label
            masks[1] = X["labels"] != _IGNORED
        return [mask for mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]

    def arranged(self, output: Any) -> Tensor:
        """Return the logits in a model's output, with classes on axis 1."""
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            name = type(self.wrapped).__name__
            raise TypeError(
                f"{name} returned a {type(output).__name__} without logits. If it is a tuple, set "
                f"{name}.config.return_dict = True. Otherwise {_WRAPPER}"
            )
        if self.task == "sequence-classification":
            return logits
        if self.task == "causal-lm":
            logits = logits[:, :-1]
        return logits.movedim(-1, 1)


class Pairs:
    """The batches of a loader of dictionaries as pairs, in a stream, with labels for the loss."""

    def __init__(self, loader: Iterable[Mapping], task: str, loss_func: nn.Module):
        self.loader, self.task, self.loss_func = loader, task, loss_func

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for index, batch in enumerate(self.loader):
            X, labels = split(batch, self.task, index)
            yield X, arranged_labels(labels, self.task, self.loss_func)


def split(batch: Mapping[str, Any], task: str, index: int) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs of a model, and the labels, of the batch with a number for messages."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Batch {index} of the loader is a {type(batch).__name__}, expected a dictionary of "
            "the model's keyword arguments and labels. For one batch, pass [batch]. Pairs (X, "
            "labels) are passed to the operators themselves, without this function."
        )
    X = dict(batch)
    single = X.pop("label", None)
    labels = X.pop("labels", single)
    if labels is None:
        labels = _next_tokens(X, task, index)
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        raise TypeError(
            f"The labels of batch {index} are a {type(labels).__name__}, expected a tensor with "
            "the batch axis first. Let the collator return tensors (return_tensors='pt')."
        )
    if task == "seq2seq-lm" and not {"decoder_input_ids", "decoder_inputs_embeds"} & X.keys():
        X["labels"] = labels  # of which the model makes the input of its decoder
    return X, labels


def _next_tokens(X: Mapping[str, Any], task: str, index: int) -> Tensor:
    """Return the tokens themselves as labels, ``[N, T]``, with those that are padding ignored."""
    ids, mask = X.get("input_ids"), X.get("attention_mask")
    if task != "causal-lm" or not isinstance(ids, Tensor):
        raise ValueError(
            f"Batch {index} of the loader has no labels, only {sorted(X)}. Add the entry 'labels', "
            "e.g. by the collator."
        )
    if mask is None:
        return ids
    if mask.shape != ids.shape:
        raise ValueError(
            f"Batch {index} of the loader has no labels, and an attention_mask of shape "
            f"{list(mask.shape)} for input_ids of shape {list(ids.shape)}, which does not say what "
            f"is padding. Add the entry 'labels', with {_IGNORED} at padding."
        )
    return ids.masked_fill(mask == 0, _IGNORED)


def arranged_labels(labels: Tensor, task: str, loss_func: nn.Module) -> Tensor:
    """Return the targets of the logits in ``Logits``."""
    if task == "causal-lm":
        return labels[:, 1:]
    if task != "sequence-classification":
        return labels
    if isinstance(loss_func, nn.CrossEntropyLoss):
        return labels.reshape(-1)
    return labels.reshape(len(labels), -1)  # [N] and [N, C] to [N, C]


def _task_of(base: nn.Module, task: str | None) -> str:
    """Return the task that is given, or that the model's class and its config show."""
    if task is not None:
        if task not in _TASKS:
            raise ValueError(
                f"task must be one of {', '.join(_TASKS)}, got {task!r}. For others, {_WRAPPER}"
            )
        return task
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", True)
    for kind in type(base).__mro__:  # subclasses have names of their own
        for task, ends in _TASKS.items():
            if kind.__name__.endswith(ends):
                # models of images and text that have a decoder only
                alone = task == "seq2seq-lm" and not is_encoder_decoder
                return "causal-lm" if alone else task
    raise ValueError(
        f"The task of {type(base).__name__} does not follow from its class. Pass task= (one of "
        f"{', '.join(_TASKS)}), or {_WRAPPER}"
    )


def _takes(base: nn.Module, name: str) -> bool:
    """Return whether a model's forward names an argument."""
    return name in inspect.signature(base.forward).parameters


def _loss_of(model_func: Logits, base: nn.Module, loader: Iterable[Mapping]) -> nn.Module:
    """Return the loss of a model, after it was compared with the model's own on the first batch."""
    task = model_func.task
    shards = shards_of(model_func)
    with (
        team_of(None, shards).peers.raise_on_all_ranks(),
        preserved_rng(),
        torch.no_grad(),
        IsolatedModules(modules_of([model_func]), shards=shards).active(),
        Overrides({}, Protected(modules_of([model_func]), source_of=shards.source_of)),
    ):
        batch = next(iter(loader), None)
        if batch is None:
            raise ValueError("loader is empty: it did not yield a single batch.")
        X, labels = move(split(batch, task, 0), next(model_func.parameters()).device)
        output = _own_output(model_func, base, X, labels)
        logits = model_func.arranged(output)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss_func = nn.CrossEntropyLoss()
        if task == "sequence-classification":
            problem_type = getattr(getattr(base, "config", None), "problem_type", None)
            loss_func = _PROBLEM_TYPES[problem_type or _infer(logits, labels)]()
        loss, y = wrap_loss(loss_func, None), arranged_labels(labels, task, loss_func)
        try:
            loss.check(logits, y)
        except ValueError as error:
            raise ValueError(
                f"{type(base).__name__} has logits of shape {list(output.logits.shape)} for labels "
                f"of shape {list(labels.shape)}, which do not fit: {error} Positions without "
                f"labels, such as soft prompts, are not supported; {_WRAPPER}"
            ) from error
        value = float(loss.sum(logits, y) / loss.denominator(logits, y))
    own = getattr(output, "loss", None)
    if isinstance(own, Tensor):
        # models in half precision may evaluate the loss in it
        least = 1e-5 if output.logits.dtype.itemsize >= 4 else 1e-4
        eps = 4 * torch.finfo(own.dtype).eps
        # a small loss is a difference of large logits, and has their rounding errors
        tops = output.logits.detach().double().flatten(0, -2).amax(-1)
        size = float(tops[tops.isfinite()].abs().sum()) / max(len(tops), 1)
        _check_loss(base, task, value, float(own), max(least, eps), eps * max(size, 1.0))
    return loss_func


def _own_output(model_func: Logits, base: nn.Module, X: Mapping[str, Any], labels: Tensor) -> Any:
    """Return the model's output, with its own loss, if it takes labels."""
    config = getattr(base, "config", None)
    problem_type = getattr(config, "problem_type", None)
    try:
        return model_func.call({**X, "labels": labels} if _takes(base, "labels") else X)
    except Exception as error:
        shapes = {n: list(x.shape) for n, x in X.items() if isinstance(x, Tensor)}
        error.add_note(
            f"{type(base).__name__} raised this for the loader's first batch, with tensors of "
            f"shapes {shapes | {'labels': list(labels.shape)}}. Remove from the batches what is "
            "not meant for the model, e.g. with remove_columns of the data set, or in the collator."
        )
        raise
    finally:  # models write what they infer
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type


def _infer(logits: Tensor, labels: Tensor) -> str:
    """Return the ``problem_type`` of a model whose config has none."""
    if logits.shape[-1] == 1:
        return "regression"
    return f"{'multi' if labels.is_floating_point() else 'single'}_label_classification"


def _check_loss(
    base: nn.Module, task: str, value: float, own: float, tolerance: float, rounding: float
) -> None:
    """Refuse a model whose own loss is another one, or has further terms of that size."""
    if isclose(own, value, rel_tol=tolerance, abs_tol=rounding) or (isnan(own) and isnan(value)):
        return
    raise ValueError(
        f"{type(base).__name__} has a loss of its own: {own:.7g} on the first batch, where that of "
        f"task '{task}' is {value:.7g}. It may have a further term (of routers: "
        "config.output_router_logits), weights, or labels that are not shifted. Pass another "
        f"task=, or {_WRAPPER}"
    )
