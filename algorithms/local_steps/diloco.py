"""Local steps with Nesterov's momentum on pseudo-gradients: DiLoCo."""

from __future__ import annotations

from types import MappingProxyType
from typing import Unpack, cast

import torch

from bagua_kernels.algorithms.local_steps.agreement import ALONE
from bagua_kernels.algorithms.local_steps.fragments import fragments_of
from bagua_kernels.algorithms.local_steps.outer_loop import OuterLoop, OuterOptions
from bagua_kernels.algorithms.local_steps.outer_nesterov import check_outer
from bagua_kernels.algorithms.local_steps.outer_round import OuterRound
from bagua_kernels.algorithms.local_steps.outer_rule import Nesterov, Number
from bagua_kernels.algorithms.models.local_model import LocalModel
from bagua_kernels.algorithms.registry import register
from bagua_kernels.bucket import Bucket


class DiLoCoOptions(OuterOptions, total=False):
    """Keyword arguments of `DiLoCo` beside its own."""

    momentum_every: int


@register
class DiLoCo(OuterLoop):
    """Ranks train by themselves, and an outer optimizer steps once in `interval` steps (Douillard et al., 2023, algorithm 1).

    1. Take `interval` steps of the optimizer, which is AdamW in the paper.
    2. d = mean(start - x) over all ranks.
    3. m = outer_momentum m + d; start -= outer_lr (d + outer_momentum m).
    4. x = start, at once or after `delay` steps, see `OuterLoop`.

    With `fragments` F, that is done for one part of the model at a time, each `interval` / F steps. That is Streaming DiLoCo
    (Douillard et al., 2025, section 2.2). A fragment has every F-th block of layers. So the line is never asked for
    the whole model at once.

    With outer_lr 1 and outer_momentum 0 that is `LocalSGD`. With momentum, one rank alone trains better for it, too.

    The paper has 0.7 and 0.9. In runs of some hundred rounds that is too much. By default both follow the number of the round,
    how many ranks there are, and how far these agree. `docs/outer-steps.md` has what was found.

    Options and their defaults, all by keyword::

        interval=30            optimizer's steps from one exchange of a parameter to its next
        outer_lr='auto'        of step 3, above 0; "auto" for one that follows how far ranks agree, see `Agreement`
        outer_momentum='auto'  of step 3, at least 0 and below 1; "auto" for one that follows the rounds, too
        fragments=1            a divisor of `interval`; `delay` is less than `interval` / `fragments`
        codec=None             of pseudo-gradients: a codec, its spec, or codecs by the round from which on they are
                               used
        error_feedback=None    True if each rank keeps what its payloads lack; by default if the codec is biased
        owner_feedback=None    True if the owners of chunks do; by default as `error_feedback`
        exact='1d'             patterns of names of parameters that no codec encodes; "1d" for all biases and norms
        min_numel=512          parameters with fewer elements are exact too
        seed=0                 of random numbers
        delay=0                optimizer's steps, less than `interval`, that an exchange may take beside training
        blend=None             from 0 to 1: the share of a rank's own parameters when a result is used
        sync_state=None        how often the optimizer's first and second moments are averaged (DES-LOC, Iacob et al.,
                               2025)
        penalty=None           a `Penalty` for pseudo-gradients with large norms; None for none
        by_speed=False         True if ranks take steps in proportion to their speeds, of which `interval` is the mean
                               then
        quorum=None            ranks whose pseudo-gradients are enough for an outer step; None for all
        grace=0.0              seconds for which a quorum waits for further ranks
        communicator=None      the ranks that train together; those of `comm.init()` if None, which is called if it has
                               not been
        hierarchical=None      True to average inside nodes in full precision first, and then between them; False for
                               never; None where nodes have several ranks
        nodes=None             which ranks share a node, such as `[[0, 1], [2, 3]]`; found by the hosts if None
        bucket_bytes=10485760  parameters are exchanged in buckets of about this size
        average_states=False   True if `synchronize` averages the optimizer's states, too
        verify_every=None      steps from one comparison of what all ranks have alike to the next; None for none, at the
                               first round after so many steps
        on_failure='raise'     "raise", or "heal": when ranks are lost, those that are left go on without an error
    """

    name = "diloco"
    # Of torchft.
    synonyms = MappingProxyType(
        {"sync_every": "interval", "fragment_sync_delay": "delay", "fragment_update_alpha": "blend"}
    )

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        interval: int = 30,
        outer_lr: Number = "auto",
        outer_momentum: Number = "auto",
        fragments: int = 1,
        **options: Unpack[DiLoCoOptions],
    ) -> None:
        """Wraps a module; collective over all ranks.

        Args:
            module: as for `OuterLoop`.
            optimizer: as for `OuterLoop`.
            interval: optimizer's steps from one exchange of a parameter to its next.
            outer_lr: of step 3, above 0; "auto" for one that follows how far ranks agree, see `Agreement`. With a momentum that
                is a number that is 0.7. A constant pseudo-gradient goes outer_lr / (1 - outer_momentum) times as far.
            outer_momentum: of step 3, at least 0 and below 1; "auto" for one that follows the rounds, too.
            fragments: a divisor of `interval`; `delay` is less than `interval` / `fragments`.
            **options: as for `OuterLoop`.

        Raises:
            TypeError: as for `OuterLoop`.
            ValueError: a number does not fit, or as for `OuterLoop`.
        """
        check_outer(outer_lr, outer_momentum)
        if fragments < 1 or interval % fragments:
            raise ValueError(f"fragments must divide interval, got {fragments=} and {interval=}")
        if (momentum_every := options.pop("momentum_every", 1)) != 1:
            raise ValueError(
                f"momentum_every must be 1, got {momentum_every=}: leave it out, since a quorum trains to a lower loss with the "
                "momentum in every outer step"
            )
        if outer_lr == "auto" and outer_momentum != "auto":
            outer_lr = ALONE[0]
        self.outer_lr, self.outer_momentum, self.fragments = outer_lr, outer_momentum, fragments
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.parts = fragments_of(names, fragments)
        self.follows_agreement = "auto" in (outer_lr, outer_momentum)
        self.acts_alone = (self.outer_lr, self.outer_momentum) != (1.0, 0.0)
        super().__init__(module, optimizer, interval=interval // fragments, **cast(OuterOptions, options))

    def round_for(self, local: LocalModel, bucket: Bucket) -> OuterRound:
        """See `OuterLoop.round_for`."""
        return OuterRound(local, bucket, self.setup.parts_for(bucket), Nesterov(self.outer_lr, self.outer_momentum))
