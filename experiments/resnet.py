"""ResNets for 32x32 images (arXiv 1512.03385, with projections where the shape changes).

With 10 classes `resnet8()` has 78,042 parameters and trains on 2 cores in minutes; `resnet18()`, 64 to 512
channels wide, has 11,173,962. Region rules that fit: `top/.*`, `.*norm.*/.*`, `entry/.*`, `.*`.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

Convolution = functools.partial(
    nn.Conv, use_bias=False, kernel_init=nn.initializers.variance_scaling(2, "fan_out", "normal")
)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, `f32[n, h, w, in] -> f32[n, h/stride, w/stride, width]`."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, values: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        # Padding on both sides, as in the paper; "SAME" with stride 2 would shift the image
        conv = functools.partial(Convolution, self.width, (3, 3), padding=1)
        hidden = nn.relu(norm(name="conv_0_norm")(conv(strides=strides, name="conv_0")(values)))
        hidden = norm(name="conv_1_norm")(conv(name="conv_1")(hidden))
        if values.shape != hidden.shape:
            values = Convolution(self.width, (1, 1), strides=strides, padding=0, name="shortcut")(values)
            values = norm(name="shortcut_norm")(values)
        return nn.relu(values + hidden)


class Stage(nn.Module):
    """Blocks of one width; all but the first stage halve the image."""

    num_blocks: int
    width: int
    stride: int

    @nn.compact
    def __call__(self, values: jax.Array, train: bool) -> jax.Array:
        for index in range(self.num_blocks):
            stride = self.stride if index == 0 else 1
            values = Block(self.width, stride, name=f"block_{index}")(values, train)
        return values


class ResNet(nn.Module):
    """A 3x3 convolution, stages that double in width, the mean over the image, and `top`, one logit a class.

    Names sort as the network runs (entry, stage, top): buckets are formed in the reverse of that order.

    Attributes:
      stage_sizes: blocks of each stage.
      width: channels of the first stage.
      num_classes: logits.
    """

    stage_sizes: tuple[int, ...]
    width: int
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Images f32[n, 32, 32, 3], about zero mean and unit variance, to logits f32[n, num_classes].

        The collection `batch_stats` holds the running means and variances of the batch norms, the same tree
        of `mean` and `var` under the names of the norms. `train` uses the batch's own instead, and renews
        them where `batch_stats` is mutable.
        """
        values = Convolution(self.width, (3, 3), padding=1, name="entry")(images)
        values = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="entry_norm")(values)
        values = nn.relu(values)
        for index, size in enumerate(self.stage_sizes):
            stage = Stage(size, self.width * 2**index, 1 if index == 0 else 2, name=f"stage_{index}")
            values = stage(values, train)
        return nn.Dense(self.num_classes, name="top")(jnp.mean(values, axis=(1, 2)))


def resnet8(num_classes: int = 10) -> ResNet:
    return ResNet((1, 1, 1), 16, num_classes)


def resnet18(num_classes: int = 10) -> ResNet:
    return ResNet((2, 2, 2, 2), 64, num_classes)
