"""Shapes of published models and rates of GPUs, for floors and benchmarks."""

from typing import NamedTuple


class ModelShape(NamedTuple):
    """Sizes of a dense decoder, from its published config.json; 16-bit weights and KV cache."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of one layer."""
        attention = (2 * self.q_heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return attention + 3 * self.intermediate * self.hidden

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * self.layer_kv_bytes_per_token

    @property
    def layer_kv_bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2


MODELS = {
    "llama-2-7b": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "llama-3.1-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "mistral-7b": ModelShape(32, 4096, 14336, 32, 8, 128, 32000),
    "qwen2-7b": ModelShape(28, 3584, 18944, 28, 4, 128, 152064),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936),
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152),
}


# For tests: every part is there, and nothing takes time.
TINY = ModelShape(2, 64, 96, 2, 1, 32, 384)


class Device(NamedTuple):
    """Rates of the data sheet: bytes per second of the memory, dense 16-bit multiply-adds as 2 operations each per second."""

    bandwidth: float
    flops: float


DEVICES = {
    "a100": Device(2.04e12, 312e12),
    "h100": Device(3.35e12, 989e12),
    "h200": Device(4.8e12, 989e12),
    "rtx4090": Device(1.008e12, 165e12),
    "b200": Device(8.0e12, 2250e12),
}
