"""LGC's autoencoder: 1-D convolutions, forward and backward, in any framework.

Strided convolutions are matrix products of the frames of a signal (`ops.frames`). Transposed
convolutions add up such products (`ops.overlap_add`, the adjoint of `ops.frames`). Derivatives
use the same few products, so no framework's automatic differentiation is needed.

Signals have shape (signals, length * channels), with the channels of a position side by side.
Parameters have shape (models, size); each model serves an equal number of consecutive signals.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from accordion_hvd.core.base import Tensor
from accordion_hvd.ops import namespace, random

SLOPE = 0.01
"""Slope of the leaky ReLU for negative inputs."""

TINY = 1e-30
"""Smallest divisor, so that zeros are not divided by zero."""


@dataclass(frozen=True)
class Layer:
    """A 1-D convolution with bias, unpadded, or its transpose; then a leaky ReLU if `leaky`."""

    inputs: int
    outputs: int
    width: int = 3
    stride: int = 2
    transposed: bool = False
    leaky: bool = True

    @property
    def matrix(self) -> tuple[int, int]:
        """Return the shape of the weights: frame of the longer signal, channels of the shorter."""
        if self.transposed:
            return self.width * self.outputs, self.inputs
        return self.width * self.inputs, self.outputs

    @property
    def size(self) -> int:
        """Return the number of parameters: weights, then biases."""
        rows, columns = self.matrix
        return rows * columns + self.outputs

    def draw(self, seed: str) -> np.ndarray:
        """Return initial parameters (He et al., 2015), which preserve a signal's magnitude."""
        taps = self.width / self.stride if self.transposed else self.width
        gain = 2.0 / (1.0 + SLOPE**2) if self.leaky else 1.0
        weights = random.normal((self.size - self.outputs,), seed)
        weights *= np.float32(np.sqrt(gain / (taps * self.inputs)))
        return np.concatenate([weights, np.zeros(self.outputs, np.float32)])

    def forward(self, parameters: Tensor, x: Tensor) -> Tensor:
        """Return the output, of shape (signals, length * outputs)."""
        xp = namespace(x)
        weights, bias = self._weights(parameters), parameters[:, None, -self.outputs :]
        if self.transposed:
            y = self._grouped(x, self.inputs, parameters) @ xp.transpose(weights)
            y = xp.overlap_add(self._frames_of(y, x), self.stride * self.outputs)
        else:
            y = self._grouped(self._frames(x), self.matrix[0], parameters) @ weights
        y = self._grouped(y, self.outputs, parameters) + bias
        y = xp.reshape(y, (xp.shape(x)[0], -1))
        return xp.maximum(y, y * SLOPE) if self.leaky else y

    def backward(
        self, parameters: Tensor, x: Tensor, y: Tensor, slope: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the derivatives by `x` and the parameters; `slope` is that by the output `y`."""
        xp = namespace(x)
        if self.leaky:
            slope = slope * (xp.cast(y > 0, "float32") * (1.0 - SLOPE) + SLOPE)
        models = xp.shape(parameters)[0]
        weights = self._weights(parameters)
        slopes = self._grouped(slope, self.outputs, parameters)
        if self.transposed:
            long = self._grouped(self._frames(slope), self.matrix[0], parameters)
            short = self._grouped(x, self.inputs, parameters)
            by_input = long @ weights
        else:
            long = self._grouped(self._frames(x), self.matrix[0], parameters)
            short = slopes
            by_input = slopes @ xp.transpose(weights)
            by_input = xp.overlap_add(self._frames_of(by_input, x), self.stride * self.inputs)
        ones = xp.full((models, 1, xp.shape(slopes)[1]), 1.0, "float32", xp.device(x))
        by_weights = xp.reshape(xp.transpose(long) @ short, (models, -1))
        by_bias = xp.reshape(ones @ slopes, (models, -1))
        return xp.reshape(by_input, xp.shape(x)), xp.concat([by_weights, by_bias], 1)

    def _weights(self, parameters: Tensor) -> Tensor:
        xp = namespace(parameters)
        weights = parameters[:, : self.size - self.outputs]
        return xp.reshape(weights, (xp.shape(parameters)[0], *self.matrix))

    def _frames(self, longer: Tensor) -> Tensor:
        """Return the frames of the longer signal: (signals, frames, width * channels)."""
        channels = self.outputs if self.transposed else self.inputs
        return namespace(longer).frames(longer, self.width * channels, self.stride * channels)

    def _frames_of(self, products: Tensor, x: Tensor) -> Tensor:
        """Reshape the products of each model's signals to one row of frames per signal."""
        xp = namespace(x)
        return xp.reshape(products, (xp.shape(x)[0], -1, self.matrix[0]))

    @staticmethod
    def _grouped(x: Tensor, width: int, parameters: Tensor) -> Tensor:
        """Return one matrix per model, with the rows of all its signals."""
        xp = namespace(x)
        return xp.reshape(x, (xp.shape(parameters)[0], -1, width))


def forward(layers: Sequence[Layer], parameters: Tensor, x: Tensor) -> list[Tensor]:
    """Return the input signal and the output of each layer."""
    signals = [x]
    for layer, own in zip(layers, _cut(layers, parameters), strict=True):
        signals.append(layer.forward(own, signals[-1]))
    return signals


def backward(
    layers: Sequence[Layer], parameters: Tensor, signals: Sequence[Tensor], slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the derivatives with respect to the first signal and to all parameters.

    Args:
        layers: the layers, first to last.
        parameters: parameters of all layers.
        signals: result of `forward`.
        slope: derivative with respect to the last of `signals`.
    """
    parts = _cut(layers, parameters)
    slopes: list[Tensor] = []
    for i in reversed(range(len(layers))):
        slope, by_parameters = layers[i].backward(parts[i], signals[i], signals[i + 1], slope)
        slopes.insert(0, by_parameters)
    return slope, namespace(slope).concat(slopes, 1)


def _cut(layers: Sequence[Layer], parameters: Tensor) -> list[Tensor]:
    parts, start = [], 0
    for layer in layers:
        parts.append(parameters[:, start : start + layer.size])
        start += layer.size
    return parts


# ------------------------------------------------------------------------------ LGC's own networks
ENCODER = (Layer(1, 64), Layer(64, 128), Layer(128, 256), Layer(256, 64), Layer(64, 4, 1, 1))
"""Four layers halve the length, and the last has four channels: a code has n / 4 values."""

_HIDDEN = [Layer(a, b, transposed=True) for a, b in itertools.pairwise((4, 32, 64, 128, 32))]
DECODER = (*_HIDDEN, Layer(32, 1, 1, 1, leaky=False))
"""Mirror of the encoder. Innovations, if any, are one more input channel of the last layer."""


def code_length(values: int) -> int:
    """Return the length of a code: the shortest that decodes to at least `values` values."""
    return max(1, -(-(values - 31) // 16) + 1)


def code_size(values: int) -> int:
    """Return the number of elements of a code, over all channels."""
    return 4 * code_length(values)


def signals_of(parts: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Return equally long vectors, divided by `scale`, as the rows of an encoder's input.

    Each row is padded to a length that the layers divide evenly, by repeating its last value.
    """
    xp = namespace(scale)
    (count,), device = xp.shape(parts[0]), xp.device(scale)
    length = 16 * code_length(count) + 15
    index = xp.minimum(xp.arange(length, device), xp.full((length,), count - 1, "int64", device))
    rows = xp.stack([xp.take(part, index) for part in parts])
    return rows / xp.maximum(scale, xp.full((1,), TINY, "float32", device))


@dataclass(frozen=True)
class Autoencoder:
    """One encoder, and one or several decoders. All parameters are one vector, in this order.

    If it `innovates`, decoders receive innovations in addition to the code.
    """

    decoders: int = 1
    innovates: bool = False

    @property
    def size(self) -> int:
        return _size(ENCODER) + self.decoders * (_size(DECODER) + self.innovates)

    def draw(self, seed: str) -> np.ndarray:
        """Return initial parameters, equal on all ranks."""
        parts = [layer.draw(f"{seed}.encoder.{i}") for i, layer in enumerate(ENCODER)]
        for number in range(self.decoders):
            parts += [layer.draw(f"{seed}.{number}.{i}") for i, layer in enumerate(DECODER)]
            parts += [np.zeros(1, np.float32)] * self.innovates
        return np.concatenate(parts)

    def encode(self, parameters: Tensor, x: Tensor) -> Tensor:
        """Return the codes of signals, of shape (signals, 4 * length)."""
        return forward(ENCODER, self._networks(parameters)[0], x)[-1]

    def decode(self, parameters: Tensor, codes: Tensor, innovations: Tensor | None) -> Tensor:
        """Return the decoded signals, plus the weighted innovations unless they are None."""
        decoders = self._networks(parameters)[1]
        return self._with_innovations(decoders, forward(DECODER, decoders, codes)[-1], innovations)

    def slopes(
        self,
        parameters: Tensor,
        x: Tensor,
        mix: Tensor,
        wanted: Tensor,
        innovations: Tensor | None = None,
        similarity: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the loss, and the reconstruction error.

        The loss is the sum over the decoded signals of the mean squared error from `wanted`, plus
        `similarity` times the sum over ordered pairs of codes of their mean squared difference. The
        matrix `mix` combines the signals' codes into the codes to decode.
        """
        xp = namespace(x)
        encoder, decoders = self._networks(parameters)
        coding = forward(ENCODER, encoder, x)
        decoding = forward(DECODER, decoders, mix @ coding[-1])
        off = self._with_innovations(decoders, decoding[-1], innovations) - wanted
        slope = off * (2.0 / xp.shape(off)[1])
        by_codes, by_decoders = backward(DECODER, decoders, decoding, slope)
        if innovations is not None:
            ones = xp.full((xp.shape(off)[1], 1), 1.0, "float32", xp.device(x))
            by_decoders = xp.concat([by_decoders, (slope * innovations) @ ones], 1)
        by_codes = xp.transpose(mix) @ by_codes
        if similarity:
            by_codes = by_codes + _similarity_slope(coding[-1]) * similarity
        _, by_encoder = backward(ENCODER, encoder, coding, by_codes)
        parts = [xp.reshape(part, (-1,)) for part in (by_encoder, by_decoders)]
        return xp.concat(parts), off

    def _with_innovations(
        self, decoders: Tensor, decoded: Tensor, innovations: Tensor | None
    ) -> Tensor:
        if innovations is None:
            return decoded
        return decoded + innovations * decoders[:, _size(DECODER) :]

    def _networks(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's parameters (1, size) and the decoders' (decoders, size)."""
        xp, own = namespace(parameters), _size(ENCODER)
        encoder = xp.reshape(parameters[:own], (1, own))
        return encoder, xp.reshape(parameters[own:], (self.decoders, -1))


def _similarity_slope(codes: Tensor) -> Tensor:
    """Return the derivative of the summed mean squared differences of pairs of codes."""
    xp = namespace(codes)
    number, width = xp.shape(codes)
    ones = xp.full((number, number), 1.0, "float32", xp.device(codes))
    return (codes * float(number) - ones @ codes) * (4.0 / width)


def _size(layers: Sequence[Layer]) -> int:
    return sum(layer.size for layer in layers)
