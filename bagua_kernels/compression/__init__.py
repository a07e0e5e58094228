"""Codecs: vectors to payloads of bytes and back, the same bytes on every device."""

from bagua_kernels.compression.absmax import AbsMaxInt4 as AbsMaxInt4
from bagua_kernels.compression.absmax import AbsMaxInt8 as AbsMaxInt8
from bagua_kernels.compression.block import BlockCodec as BlockCodec
from bagua_kernels.compression.cast import Cast as Cast
from bagua_kernels.compression.cast import Identity as Identity
from bagua_kernels.compression.codec import Codec as Codec
from bagua_kernels.compression.codec import Contractive as Contractive
from bagua_kernels.compression.codec import Unbiased as Unbiased
from bagua_kernels.compression.codec import fold_seed as fold_seed
from bagua_kernels.compression.codec import from_spec as from_spec
from bagua_kernels.compression.codec import register as register
from bagua_kernels.compression.error_feedback import ErrorFeedback as ErrorFeedback
from bagua_kernels.compression.error_feedback import Piece as Piece
from bagua_kernels.compression.fp8 import FP8 as FP8
from bagua_kernels.compression.minmax import MinMaxUInt2 as MinMaxUInt2
from bagua_kernels.compression.minmax import MinMaxUInt4 as MinMaxUInt4
from bagua_kernels.compression.minmax import MinMaxUInt8 as MinMaxUInt8
from bagua_kernels.compression.natural import Natural as Natural
from bagua_kernels.compression.powersgd import LowRank as LowRank
from bagua_kernels.compression.powersgd import PowerSGD as PowerSGD
from bagua_kernels.compression.qsgd import QSGD as QSGD
from bagua_kernels.compression.randomk import RandomK as RandomK
from bagua_kernels.compression.sign import Sign as Sign
from bagua_kernels.compression.terngrad import TernGrad as TernGrad
from bagua_kernels.compression.threshold_topk import ThresholdTopK as ThresholdTopK
from bagua_kernels.compression.topk import TopK as TopK
