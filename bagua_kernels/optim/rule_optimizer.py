"""A complete fused optimizer from a scalar update rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from bagua_kernels.launchers.multitensor import EXTRAS
from bagua_kernels.optim.step.entry import DRAWS
from bagua_kernels.optim.step.fused import Fused
from bagua_kernels.optim.step.scalars import Counters
from bagua_kernels.optim.step.update import Group, Update
from bagua_kernels.rules.calls import code_of
from bagua_kernels.rules.optimizers import ElementwiseRule


class RuleOptimizer(Fused, Optimizer):
    """An optimizer that a rule defines; `rule_optimizer` makes subclasses of it.

    Attributes:
        state_values: the states of the parameter's shape, in the rule's order, and what each element is at first.
        scalar_names: the rule's scalars.
        derive: (options of a group, number of the step, from 1) -> scalars that are not options, by name.
    """

    state_values: Mapping[str, float]
    scalar_names: Sequence[str]
    derive: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] | None

    def _prepare(self, group: Group) -> set[int]:
        missing = [
            (p, name)
            for p in group["params"]
            for name in self.state_values
            if p.grad is not None and self.state.get(p, {}).get(name) is None
        ]
        fresh = super()._prepare(group)
        for p, name in missing:
            value = self.state_values[name]
            # A complex number is two parameters.
            self.state[p][name].fill_(complex(value, value) if p.is_complex() else value)
        return fresh

    def _advance(self, group: Group, counters: Counters) -> dict[str, Any]:
        step = counters["step"] = counters["step"] + 1
        known: dict[str, Any] = {**group, "step": step}
        if self.derive is not None:
            known |= self.derive(group, step)
        return {name: known[name] for name in self.scalar_names}


def rule_optimizer(
    name: str,
    rule: Callable[..., Any],
    *,
    state: Mapping[str, float],
    defaults: Mapping[str, Any],
    derive: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] | None = None,
) -> type[RuleOptimizer]:
    """Makes an optimizer class from the update of one element.

    Args:
        name: of the class.
        rule: a plain function in the vocabulary of `bagua_kernels.jit.vocabulary`. Its arguments are parameter, gradient,
            one value of each state, then scalars. It returns the new parameter and states, a tuple if there are states. A
            scalar is an option of the group, "step" (the number of the step, from 1), or a result of `derive`, by its name.
        state: names of the states, in the rule's order, with what every element is at first.
        defaults: the options of a group and their defaults; `maximize` is added.
        derive: computes further scalars once a step instead of once an element, such as corrections of a bias, in float64:
            (options, step) -> scalars by name. Uses arithmetic only, so that it works on tensors, too, if steps are counted on
            a GPU.

    Returns:
        A class whose constructor takes the parameters and, as keywords, `defaults` and `extras`; on the CPU and on GPUs.

    Raises:
        TypeError: the rule is no plain function, or an argument of it is not known.
        ValueError: a state or an option has a name that is taken.
    """
    code_of(rule)
    arguments = list(inspect.signature(rule).parameters)
    arrays = 2 + len(state)
    options = {"maximize": False, **defaults}
    reserved = {"params", "step", *EXTRAS, DRAWS} & {*state, *defaults} | {n for n in state if n.startswith("_")}
    if reserved:
        raise ValueError(
            f"{sorted(reserved)[0]!r} cannot be the name of a state or an option: optimizers use it themselves"
        )
    if any(a.kind is not a.POSITIONAL_OR_KEYWORD for a in inspect.signature(rule).parameters.values()):
        raise TypeError(f"rule {rule.__name__!r} must take all arguments by position")
    derived = () if derive is None else tuple(derive(options, 1.0))
    for scalar in arguments[arrays:]:
        if scalar not in options and scalar != "step" and scalar not in derived:
            raise TypeError(
                f"rule {rule.__name__!r} takes {scalar!r}, which is no option ({', '.join(options)}), nor 'step', nor derived"
            )
    if len(arguments) < arrays:
        raise TypeError(
            f"rule {rule.__name__!r} must take a parameter, a gradient and {len(state)} states, got {arguments}"
        )
    writes = (0, *range(2, arrays))
    update = Update(ElementwiseRule(name.lower(), rule, arrays, writes), tuple(state), ("step",))

    def __init__(self: RuleOptimizer, params: Any, *, extras: Any = None, **given: Any) -> None:
        unknown = sorted(set(given) - set(options))
        if unknown:
            raise TypeError(f"{name} has no option {unknown[0]!r}; it has {', '.join(options)}")
        lr = given.get("lr")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"lr must have one element, got shape {tuple(lr.shape)}")
        super(RuleOptimizer, self).__init__(params, {**options, **given}, extras=extras)

    keyword = inspect.Parameter.KEYWORD_ONLY
    # On the function, not on the class, whose subclasses may have constructors of their own.
    __init__.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *(inspect.Parameter(option, keyword, default=value) for option, value in options.items()),
        inspect.Parameter("extras", keyword, default=None),
    ])  # fmt: skip
    return type(
        name,
        (RuleOptimizer,),
        {
            "__doc__": inspect.getdoc(rule),
            "__module__": rule.__module__,
            "__init__": __init__,
            "state_values": dict(state),
            "scalar_names": tuple(arguments[arrays:]),
            "derive": None if derive is None else staticmethod(derive),
            "_rule": update,
        },
    )
