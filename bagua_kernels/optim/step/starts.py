"""Values from which a step starts in the place of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from bagua_kernels.launchers.multitensor import START, Table, Variant
from bagua_kernels.optim.step.launch import Launch, fits, memory_format
from bagua_kernels.optim.step.shards import is_plain


class Starts:
    """Values from which one step starts, by parameter. Kernels read them, or they are copied to the parameters before."""

    def __init__(self, values: Mapping[Tensor, Tensor], params: Iterable[Tensor]) -> None:
        """Takes the values of some parameters.

        Args:
            values: by parameter.
            params: all parameters of the optimizer.

        Raises:
            ValueError: a parameter is not among these, or a value has another shape, dtype or device.
        """
        known = {id(p) for p in params}
        for parameter, value in values.items():
            if id(parameter) not in known:
                raise ValueError(f"a start is for a parameter of shape {tuple(parameter.shape)} that is in no group")
            if (value.shape, value.dtype, value.device) != (parameter.shape, parameter.dtype, parameter.device):
                raise ValueError(
                    f"a start must be {parameter.dtype} of shape {tuple(parameter.shape)} on {parameter.device} as its "
                    f"parameter, got {value.dtype} of shape {tuple(value.shape)} on {value.device}"
                )
        self._values = dict(values)
        # What kernels read, which must stay in memory until they have.
        self._read: list[Tensor] = []

    def take(self, launch: Launch) -> tuple[Variant, Table] | None:
        """The kernel and the table of a launch that starts from the values, which are then not copied.

        None if a kernel cannot read them: if the launch works on copies, or a parameter is left out of the step. Each parameter
        needs a value, which lies in memory as the parameter does.
        """
        found = [value for p in launch.params if (value := self._values.get(p)) is not None and lies_as(value, p)]
        if not found or len(found) < len(launch.params) or not launch.by_address or launch.missing is not None:
            return None
        own = launch.variant
        if launch.started is None:
            dtypes, extras = (*own.dtypes, own.dtypes[0]), (*own.extras, START)
            table = Table([*[launch.params] * len(own.dtypes), found])
            table.release()
            launch.started = Variant(own.rule, dtypes, own.scalars, extras, own.stochastic), table
        variant, table = launch.started
        for column in range(len(own.dtypes)):
            table.replace(column, launch.table.addresses[:, column])
        table.replace(len(own.dtypes), [value.data_ptr() for value in found])
        self._read += [self._values.pop(parameter) for parameter in launch.params]
        return variant, table

    def copy(self) -> None:
        """Copies the values that no kernel reads to their parameters."""
        while self._values:
            parameter, value = self._values.popitem()
            parameter.copy_(value)


def lies_as(value: Tensor, parameter: Tensor) -> bool:
    """True if the elements of a value are in memory as they are, in the order of its parameter's."""
    return is_plain(value) and not value.is_neg() and not value.is_conj() and fits(value, memory_format(parameter))
