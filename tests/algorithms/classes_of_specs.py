"""The classes that `from_spec` has for type checkers; `make lint` fails if mypy infers others."""

from typing import assert_type

import torch

from bagua_kernels import algorithms

module = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(module.parameters())
text = "bytegrad"
assert_type(algorithms.from_spec("allreduce", module, optimizer), algorithms.GradientAllReduce)
assert_type(algorithms.from_spec("async_decentralized", module, optimizer), algorithms.AsyncDecentralized)
assert_type(algorithms.from_spec("async_model_average", module, optimizer), algorithms.AsyncModelAverage)
assert_type(algorithms.from_spec("auto", module, optimizer), algorithms.AutoTune)
assert_type(algorithms.from_spec("bytegrad", module, optimizer), algorithms.ByteGrad)
assert_type(algorithms.from_spec("choco", module, optimizer), algorithms.Choco)
assert_type(algorithms.from_spec("compressed", module, optimizer), algorithms.CompressedAllReduce)
assert_type(algorithms.from_spec("d2", module, optimizer), algorithms.D2)
assert_type(algorithms.from_spec("decentralized", module, optimizer), algorithms.Decentralized)
assert_type(algorithms.from_spec("dgc", module, optimizer), algorithms.DGC)
assert_type(algorithms.from_spec("diloco", module, optimizer), algorithms.DiLoCo)
assert_type(algorithms.from_spec("double_squeeze", module, optimizer), algorithms.DoubleSqueeze)
assert_type(algorithms.from_spec("fp8", module, optimizer), algorithms.FP8AllReduce)
assert_type(algorithms.from_spec("local_sgd", module, optimizer), algorithms.LocalSGD)
assert_type(algorithms.from_spec("lowprec", module, optimizer), algorithms.LowPrecisionDecentralized)
assert_type(algorithms.from_spec("mu_loco", module, optimizer), algorithms.MuLoCo)
assert_type(algorithms.from_spec("natural", module, optimizer), algorithms.NaturalCompression)
assert_type(algorithms.from_spec("onebit", module, optimizer), algorithms.OneBitSGD)
assert_type(algorithms.from_spec("onebit_adam", module, optimizer), algorithms.OneBitAdam)
assert_type(algorithms.from_spec("post_local_sgd", module, optimizer), algorithms.PostLocalSGD)
assert_type(algorithms.from_spec("powersgd", module, optimizer), algorithms.PowerSGD)
assert_type(algorithms.from_spec("qadam", module, optimizer), algorithms.QAdam)
assert_type(algorithms.from_spec("qsgd", module, optimizer), algorithms.QSGD)
assert_type(algorithms.from_spec("randomk", module, optimizer), algorithms.RandomK)
assert_type(algorithms.from_spec("sgp", module, optimizer), algorithms.StochasticGradientPush)
assert_type(algorithms.from_spec("sign", module, optimizer), algorithms.SignSGD)
assert_type(algorithms.from_spec("slow_mo", module, optimizer), algorithms.SlowMo)
assert_type(algorithms.from_spec("sparse_loco", module, optimizer), algorithms.SparseLoCo)
assert_type(algorithms.from_spec("terngrad", module, optimizer), algorithms.TernGrad)
assert_type(algorithms.from_spec("topk", module, optimizer), algorithms.TopK)
assert_type(algorithms.from_spec("wagma", module, optimizer), algorithms.Wagma)
assert_type(algorithms.from_spec("bytegrad:block=64", module), algorithms.Algorithm)
assert_type(algorithms.from_spec(text, module), algorithms.Algorithm)
