"""Kinds of models that people train, as small as can be, with tasks of their own where they need them; copied beside
the recipes of the lab. Each class is a kind: what `tests/chaos/test_model_kinds.py` says of it."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

# --- from tokens to scores of the next one ----------------------------------------------------------------------------


class ByteModel(nn.Module):
    """An embedding, a body that keeps the shape [b, s, width], an output layer."""

    width = 8

    def __init__(self, vocab_size, seq_len):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, self.width)
        self.sequence = seq_len
        self.setup()
        self.out = nn.Linear(self.width, vocab_size)

    def setup(self):
        self.body = nn.Linear(self.width, self.width)

    def hidden(self, x):
        return torch.tanh(self.body(x))

    def forward(self, tokens):
        return self.out(self.hidden(self.embedding(tokens)))


class SpectralNorm(ByteModel):
    def setup(self):
        self.body = parametrizations.spectral_norm(nn.Linear(self.width, self.width))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


class OwnParametrization(ByteModel):
    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        parametrize.register_parametrization(self.body, "weight", Symmetric())


class OldWeightNorm(ByteModel):
    """Weights computed by a hook before each forward."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.scale = nn.Parameter(torch.ones(self.width, 1))
        self.direction = nn.Parameter(torch.randn(self.width, self.width))
        del self.body.weight
        self.body.register_forward_pre_hook(self.fill)
        self.fill()

    def fill(self, *_):
        self.body.weight = self.scale * F.normalize(self.direction, dim=1)


class Encoder(ByteModel):
    """torch's own transformer layers, with learned positions and dropout."""

    def setup(self):
        layer = nn.TransformerEncoderLayer(self.width, 2, 16, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.randn(self.sequence, self.width))
        mask = nn.Transformer.generate_square_subsequent_mask(self.sequence)
        self.register_buffer("mask", mask, persistent=False)

    def hidden(self, x):
        return self.body(x + self.position[: x.shape[1]], mask=self.mask[: x.shape[1], : x.shape[1]], is_causal=True)


class Tied(ByteModel):
    def __init__(self, vocab_size, seq_len):
        super().__init__(vocab_size, seq_len)
        self.out = nn.Linear(self.width, vocab_size, bias=False)
        self.out.weight = self.embedding.weight


class Shared(ByteModel):
    """One parameter under three names, and a module under two."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.second = nn.Linear(self.width, self.width)
        self.second.weight = self.body.weight
        self.third = self.second
        self.scale = self.second.bias

    def hidden(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.body(x))))) * self.scale


class Frozen(ByteModel):
    def __init__(self, vocab_size, seq_len):
        super().__init__(vocab_size, seq_len)
        self.embedding.requires_grad_(False)
        self.body.weight.requires_grad_(False)


class Unused(ByteModel):
    """A part that no forward uses."""

    def setup(self):
        super().setup()
        self.spare = nn.Linear(3, 3)


class Fourier(ByteModel):
    """Mixes features by an FFT, with real filters and a complex constant."""

    def setup(self):
        self.filter = nn.Parameter(torch.randn(self.width // 2 + 1, 2))
        self.register_buffer("turn", torch.polar(torch.ones(()), torch.tensor(0.3)))

    def hidden(self, x):
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter) * self.turn
        return torch.fft.irfft(spectrum, n=self.width)


class Scalar(ByteModel):
    """Parameters without dimensions, and an empty one."""

    def setup(self):
        super().setup()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, self.width))
        self.none = nn.Linear(0, self.width)

    def hidden(self, x):
        return super().hidden(x) * self.temperature + self.empty.sum() + self.none(x[..., :0])


class Strided(ByteModel):
    """Parameters whose memory is in another order, or has gaps."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.body.weight = nn.Parameter(torch.randn(self.width, self.width).t())
        self.gaps = nn.Parameter(torch.randn(self.width, 2)[:, 0])
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("view", torch.arange(2.0 * self.width)[::2])

    def hidden(self, x):
        x = super().hidden(x) * self.gaps + self.view
        return x + self.conv(x.view(-1, 2, 2, self.width // 4)).reshape(x.shape)


class MixedDtypes(ByteModel):
    def setup(self):
        self.body = nn.Linear(self.width, self.width, dtype=torch.bfloat16)
        self.fine = nn.Linear(self.width, self.width, dtype=torch.float64)
        self.register_buffer("table", torch.arange(self.width, dtype=torch.int16))
        self.register_buffer("mask", torch.arange(self.width) % 2 == 0)
        self.register_buffer("halves", torch.ones(self.width, dtype=torch.float16))

    def hidden(self, x):
        x = self.fine(self.body(x.bfloat16()).double()).float()
        return torch.where(self.mask, x, x + self.table) * self.halves.float()


class EightBit(ByteModel):
    """Frozen weights in 8 bits with a trained scale."""

    def setup(self):
        self.packed = nn.Parameter(torch.randint(-127, 127, (self.width, self.width)).to(torch.int8), False)
        self.scale = nn.Parameter(torch.full((self.width, 1), 0.01))

    def hidden(self, x):
        return torch.tanh(F.linear(x, self.packed.float() * self.scale))


class Dropping(ByteModel):
    """Dropout, and residual branches that are left out at random."""

    def setup(self):
        self.blocks = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def hidden(self, x):
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.7:
                x = x + self.drop(torch.tanh(block(x)))
        return x


class Recomputed(ByteModel):
    """With torch's own recomputation inside."""

    def hidden(self, x):
        return checkpoint(super().hidden, x, use_reentrant=False)


class LoadsItself(ByteModel):
    """Renames what it holds when it is saved and loaded, as modules do for the sake of old files."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        for name in [name for name in state if name.startswith(f"{prefix}old_body.")]:
            state[name.replace("old_body.", "body.")] = state.pop(name)


# --- state that forwards change ---------------------------------------------------------------------------------------


class Average(ByteModel):
    """A running mean that the forward uses."""

    def setup(self):
        super().setup()
        self.register_buffer("mean", torch.zeros(self.width))

    def hidden(self, x):
        x = super().hidden(x)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


class Teacher(ByteModel):
    """A second copy that follows the first in each forward."""

    def setup(self):
        super().setup()
        self.teacher = nn.Linear(self.width, self.width).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        for own, each in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            own.lerp_(each, 0.1)

    def hidden(self, x):
        if self.training:
            self.follow()
        return super().hidden(x) + self.teacher(x).detach()


class ExtraState(ByteModel):
    def setup(self):
        super().setup()
        self.seen = 0

    def hidden(self, x):
        self.seen += self.training
        return super().hidden(x) * (1 + 0.01 * self.seen)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


# --- pictures -------------------------------------------------------------------------------------------------------


def small(kind=nn.Identity, channels=4):
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        kind(),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def batch_norm(num_classes):
    return nn.Sequential(small(lambda: nn.BatchNorm2d(4)), nn.Linear(4, num_classes))


def synchronised(num_classes):
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm(num_classes))


class FrozenNorm(nn.Sequential):
    """BatchNorm that stays as it is, as in fine-tuning."""

    def __init__(self, num_classes):
        super().__init__(small(lambda: nn.BatchNorm2d(4)), nn.Linear(4, num_classes))

    def train(self, mode=True):
        super().train(mode)
        self[0][1].eval()
        return self


class Autoencoder(nn.Module):
    """Returns the pictures again, drawn from a distribution, with its distance from the normal one."""

    def __init__(self):
        super().__init__()
        self.encode, self.spread = nn.Conv2d(1, 2, 4, stride=4), nn.Conv2d(1, 2, 4, stride=4)
        self.decode = nn.ConvTranspose2d(2, 1, 4, stride=4)

    def forward(self, images):
        code = self.encode(images)
        log = self.spread(images)
        distance = 0.5 * (code.square() + log.exp() - log - 1).sum()
        noise = torch.randn_like(code) if self.training else 0.0
        return self.decode(code + noise * (0.5 * log).exp()), distance


class Siamese(nn.Module):
    """One encoder for both halves of a picture."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(small(), nn.Linear(4, 4))

    def forward(self, left, right):
        return self.encoder(left), self.encoder(right)


def broken(num_classes=2):
    return {"width": 8}["depth"]


# --- tasks ------------------------------------------------------------------------------------------------------------


def floats(batch):
    return batch["images"].permute(0, 3, 1, 2).float() / 255


class Rebuild:
    """The model returns the pictures, and a penalty."""

    def inputs(self, batch):
        return (floats(batch),), {}

    def loss(self, output, batch):
        made, penalty = output
        return F.mse_loss(made, floats(batch), reduction="sum") + penalty, batch["images"].numel()


class Halves:
    """Halves of one picture shall lie nearer to each other than to those of its neighbour in the micro-batch."""

    def inputs(self, batch):
        return floats(batch).chunk(2, -1), {}

    def loss(self, output, batch):
        left, right = output
        return F.triplet_margin_loss(left, right, right.roll(1, 0), reduction="sum"), len(left)
