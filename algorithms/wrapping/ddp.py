"""`DistributedDataParallel`: what takes the place of its arguments here, and that the two do not go together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

# Every argument of any version of `DistributedDataParallel` that the algorithms here do not have.
ARGUMENTS = {
    "device_ids": "it is not needed: the module's device is that of the rank; move the module there first",
    "output_device": "it is not needed: outputs are where the module leaves them",
    "dim": "it is not needed: inputs are not scattered; give each rank its own batches",
    "process_group": "pass communicator=comm.TorchCommunicator(group) instead",
    "device_mesh": "pass communicator=comm.TorchCommunicator(mesh.get_group()) instead, of a mesh of one dimension",
    "bucket_cap_mb": "pass bucket_bytes instead, in bytes: bucket_cap_mb=25 is bucket_bytes=25 << 20",
    "bucket_cap_mb_list": "pass bucket_bytes instead, one size in bytes: the first buckets are smaller by themselves",
    "find_unused_parameters": "it is not needed: parameters that a pass does not use are found in every pass",
    "check_reduction": "it is not needed: every backward pass ends when all of its gradients are reduced",
    "gradient_as_bucket_view": "it is not needed: gradients are views of their buckets",
    "batched_grad_copy": "it is not needed: gradients are views of their buckets",
    "static_graph": "it is not needed: buckets follow the order of the first gradients; checkpointing needs "
    "use_reentrant=False",
    "forward_sync_buffers": "pass broadcast_buffers instead",
    "init_sync": "it is not needed: rank 0's parameters and buffers are always given to all ranks at the start",
    "delay_all_reduce_named_params": "there is none: each gradient is exchanged as soon as its bucket is complete; "
    "choose how soon with bucket_bytes",
    "param_to_hook_all_reduce": "there is none: each gradient is exchanged as soon as its bucket is complete; choose "
    "how soon with bucket_bytes",
    "mixed_precision": "there is none: use torch.autocast, or a module of half precision",
    "skip_all_reduce_unused_params": "there is none: a parameter that no rank used travels as zeros in its bucket, and its "
    "grad stays None",
}

# Classes from these files exchange gradients themselves, or replace parameters by shards.
_EXCHANGING = ("torch.nn.parallel.distributed", "torch.distributed.fsdp", "deepspeed.")


class ArgumentError(TypeError):
    """A constructor got an argument that it does not have, or lacks one."""


def explain_arguments(kind: type, names: Iterable[str]) -> None:
    """Does nothing, unless a constructor was given an argument of `DistributedDataParallel`.

    Args:
        kind: the class that is made.
        names: of arguments that it does not have.

    Raises:
        ArgumentError: one of them is an argument of `DistributedDataParallel`.
    """
    answers = [f"{name}: {ARGUMENTS[name]}" for name in sorted(names) if name in ARGUMENTS]
    if answers:
        raise ArgumentError(f"{kind.__name__} has not all arguments of DistributedDataParallel; {'; '.join(answers)}")


def is_inside_ddp(module: torch.nn.Module) -> bool:
    """Returns True if this runs in the forward pass of a `DistributedDataParallel` that holds a module."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return active is not None and any(each is module for each in active.modules())


def refusal(kind: type, other: str = "DistributedDataParallel") -> str:
    """Returns what is wrong with an algorithm inside another wrapper, and what to do.

    Args:
        kind: the algorithm's class.
        other: the wrapper around it.
    """
    return (
        f"{other} is around a {kind.__name__}, and both would exchange the same gradients: leave {other} out, or give it the "
        f"module itself. Accelerate's prepare(), Lightning's DDPStrategy, the Trainer of Hugging Face and Ray Train put "
        f"DistributedDataParallel around every model: use a {kind.__name__} in a training loop of your own"
    )


def exchanging(module: torch.nn.Module, algorithm: type) -> str:
    """Returns what is wrong with a module that is to be wrapped in an algorithm; an empty text if nothing is.

    Args:
        module: no part of it may exchange gradients by itself.
        algorithm: the base class of all algorithms.
    """
    for name, part in module.named_modules():
        where = f"the submodule {name!r}" if name else "the module"
        for kind in type(part).__mro__:
            if kind is algorithm:
                return (
                    f"{where} is a {type(part).__name__} already and would exchange gradients twice: wrap its .module"
                )
            if kind.__module__.startswith(_EXCHANGING):
                return (
                    f"{where} is a {kind.__name__}, which exchanges gradients itself: wrap the module without it, or use "
                    f"{kind.__name__} alone"
                )
    return ""
