"""Faults of one line each, which take a remedy out of a door, and the tests that have to notice them.

    .venv-doors/bin/python -m tests.doors.faults [--only N ...] [--list] [--jobs N]

Other libraries' loops move models, save what they know of, and evaluate in the middle of a round. Each fault lets one of these
do harm again. `tests/mutations.py` describes how faults are tried, and the exit status.
"""

from __future__ import annotations

import sys

from tests.mutations import Fault, main

_LIGHTNING, _ACCELERATE, _TRANSFORMERS, _GUEST = (
    f"bagua_kernels/integrations/{name}.py" for name in ("lightning", "accelerate", "transformers", "guest")
)
_IN_LIGHTNING, _IN_ACCELERATE, _IN_TRANSFORMERS = (
    f"tests/doors/test_{name}.py" for name in ("lightning", "accelerate", "transformers")
)

FAULTS = (
    Fault(
        "Lightning, resuming",
        _LIGHTNING,
        "            if self.broadcast(folder.is_dir()):",
        "            if False:",
        "Residuals of all ranks, and their own parameters, are not restored.",
        (f"{_IN_LIGHTNING}::test_resume",),
        "all",
    ),
    Fault(
        "Lightning, optimizers",
        _LIGHTNING,
        "self.guest.wrap(self.lightning_module, self.optimizers, self.root_device, scaler)",
        "self.guest.wrap(self.lightning_module, [], self.root_device, scaler)",
        "Algorithms on parameters find no optimizer, as before Lightning has made it.",
        (f"{_IN_LIGHTNING}::test_fit",),
        "all",
    ),
    Fault(
        "Lightning, two packages",
        _LIGHTNING,
        "for name in imported or [",
        "for name in imported[:1] or [",
        "The second package that is imported does not know the strategy's name.",
        (f"{_IN_LIGHTNING}::test_each_package_has_a_class_of_its_own",),
        "all",
    ),
    Fault(
        "Lightning, validation",
        _LIGHTNING,
        "if trainer.state.fn != fitting or self.guest.hooks:",
        "if self.guest.hooks:",
        "Validation without training wraps a model that has no optimizer.",
        (f"{_IN_LIGHTNING}::test_fit",),
        "all",
    ),
    Fault(
        "Lightning, mid-round",
        _LIGHTNING,
        "if not self.guest.exchanges_parameters or not self.guest.acts:",
        "if True:",
        "A checkpoint in the middle of a round has the weights of rank 0 instead of the mean.",
        (f"{_IN_LIGHTNING}::test_resume", f"{_IN_LIGHTNING}::test_fit"),
        "all",
    ),
    Fault(
        "Lightning, exceptions",
        _LIGHTNING,
        "            self._failure = exception",
        "            self._failure = None",
        "After an exception a rank waits for others, which do not come.",
        (f"{_IN_LIGHTNING}::test_an_exception_leaves_nothing",),
        "all",
    ),
    Fault(
        "Accelerate, autocast",
        _ACCELERATE,
        "    bare = accelerator.prepare_model(model, evaluation_mode=True)",
        "    bare = model",
        "Mixed precision has no effect, and nothing is printed.",
        (f"{_IN_ACCELERATE}::test_training",),
        "all",
    ),
    Fault(
        "Accelerate, prepared",
        _ACCELERATE,
        '    if getattr(model, "_is_accelerate_prepared", False) or isinstance(',
        "    if False and isinstance(",
        "An algorithm is put around DDP, and gradients are averaged twice.",
        (f"{_IN_ACCELERATE}::test_refusals",),
        "all",
    ),
    Fault(
        "Accelerate, sharding",
        _ACCELERATE,
        '    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):',
        "    if False:",
        "A model that FSDP shards is taken for a whole one.",
        (f"{_IN_ACCELERATE}::test_refusals",),
        "all",
    ),
    Fault(
        "Accelerate, states",
        _ACCELERATE,
        "        self._guest.load(self._folder)",
        "        self._folder.exists()",
        "Residuals of all ranks, and their own parameters, are not restored.",
        (f"{_IN_ACCELERATE}::test_checkpoints",),
        "all",
    ),
    Fault(
        "Accelerate, unwrapping",
        _ACCELERATE,
        "        accelerator.unwrap_model = self._unwrapped",
        "        accelerator.unwrap_model = self._unwrap",
        "`unwrap_model` returns the algorithm, and names of saved files begin with it.",
        (f"{_IN_ACCELERATE}::test_training", f"{_IN_ACCELERATE}::test_checkpoints"),
        "all",
    ),
    Fault(
        "Transformers, moving",
        _TRANSFORMERS,
        "model = accelerator.prepare_model(trainer.model, evaluation_mode=True)",
        "model = trainer.model",
        "Evaluation in the middle of training moves parameters out of the algorithm's memory.",
        (f"{_IN_TRANSFORMERS}::test_training_and_resuming",),
        "all",
    ),
    Fault(
        "Transformers, resuming",
        _TRANSFORMERS,
        "        self._guest.load(folder)",
        "        folder.exists()",
        "Residuals of all ranks, and their own parameters, are not restored.",
        (f"{_IN_TRANSFORMERS}::test_training_and_resuming",),
        "all",
    ),
    Fault(
        "Transformers, batch size",
        _TRANSFORMERS,
        "    if arguments.auto_find_batch_size:",
        "    if False:",
        "The Trainer makes the model anew on one rank, and others wait.",
        (f"{_IN_TRANSFORMERS}::test_refusals_and_exceptions",),
        "all",
    ),
    Fault(
        "Transformers, evaluation",
        _TRANSFORMERS,
        "            return self._evaluate(*arguments, **named)",
        "            return self._guest.end_averaged() or self._evaluate(*arguments, **named)",
        "In the middle of a round each rank evaluates a model of its own.",
        (f"{_IN_TRANSFORMERS}::test_training_and_resuming",),
        "all",
    ),
    Fault(
        "Transformers, saving",
        _TRANSFORMERS,
        "            self._save(model, trial, *arguments, **named)",
        "            self._guest.end_averaged() or self._save(model, trial, *arguments, **named)",
        "A checkpoint in the middle of a round has the weights of rank 0 instead of the mean.",
        (f"{_IN_TRANSFORMERS}::test_training_and_resuming",),
        "all",
    ),
    Fault(
        "Transformers, generation",
        _TRANSFORMERS,
        "            return self._predict(*arguments, **named)",
        "            return self._guest.end_averaged() or self._predict(*arguments, **named)",
        "Ranks generate sequences of unequal lengths, and their collectives part.",
        (f"{_IN_TRANSFORMERS}::test_ranks_generate_with_one_model",),
        "all",
    ),
    Fault(
        "PEFT, the base",
        "algorithms/wrapping/frozen.py",
        "    tensors = [_memory(part) for _, part in named]",
        "    tensors = [_memory(part) + communicator.rank for _, part in named]",
        "The bytes of a frozen base count as different, and gigabytes are sent at the start.",
        ("tests/doors/test_peft.py",),
    ),
    Fault(
        "Ray, devices",
        "comm/backends/torch_distributed/group.py",
        '            device = torch.device("cuda", torch.cuda.current_device())',
        '            device = torch.device("cuda", int(__import__("os").environ.get("LOCAL_RANK", 0)))',
        "Two workers share a GPU, because Ray has given them others than LOCAL_RANK counts.",
        ("tests/doors/test_ray.py",),
    ),
    Fault(
        "Ray, ends",
        _GUEST,
        "        if made and comm.is_initialized():",
        "        if False:",
        "Threads and sockets are left when training has ended, and the next attempt in this process meets them.",
        (f"{_IN_ACCELERATE}::test_training", f"{_IN_TRANSFORMERS}::test_training_and_resuming"),
        "all",
    ),
)

if __name__ == "__main__":
    sys.exit(main(every=FAULTS))
