"""Codecs: vectors to payloads of bytes and back, the same bytes on every device."""

from bagua_kernels.compression.codec import Codec as Codec
from bagua_kernels.compression.codec import Contractive as Contractive
from bagua_kernels.compression.codec import Unbiased as Unbiased
from bagua_kernels.compression.codec import fold_seed as fold_seed
from bagua_kernels.compression.codec import from_spec as from_spec
from bagua_kernels.compression.codec import register as register
from bagua_kernels.compression.minmax import MinMaxUInt8 as MinMaxUInt8

__all__ = ["Codec", "Contractive", "MinMaxUInt8", "Unbiased", "fold_seed", "from_spec", "register"]
