"""Kinds of models that people train, as small as can be, with tasks of their own where they need them; copied beside
the recipes of the lab. Each class is a kind: what `tests/world/test_model_kinds.py` says of it."""

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


class Recurrent(ByteModel):
    kind = nn.RNN

    def setup(self):
        self.body = self.kind(self.width, self.width, num_layers=2, batch_first=True, dropout=0.1)

    def hidden(self, x):
        return self.body(x)[0]


class Gru(Recurrent):
    kind = nn.GRU


class Lstm(Recurrent):
    kind = nn.LSTM


class LstmWithProjection(ByteModel):
    def setup(self):
        self.body = nn.LSTM(self.width, 2 * self.width, proj_size=self.width, batch_first=True)
        self.start = nn.Parameter(torch.zeros(1, 1, self.width))

    def hidden(self, x):
        start = self.start.expand(1, len(x), self.width).contiguous()
        return self.body(x, (start, start.new_zeros(1, len(x), 2 * self.width)))[0]


class LstmCell(ByteModel):
    def setup(self):
        self.body = nn.LSTMCell(self.width, self.width)

    def hidden(self, x):
        found, state = [], None
        for each in x.unbind(1):
            state = self.body(each, state)
            found.append(state[0])
        return torch.stack(found, 1)


class CausalConvolution(ByteModel):
    """With weight norm."""

    def setup(self):
        self.body = parametrizations.weight_norm(nn.Conv1d(self.width, self.width, 3, dilation=2))

    def hidden(self, x):
        return torch.tanh(self.body(F.pad(x.transpose(1, 2), (4, 0)))).transpose(1, 2)


class SpectralNorm(ByteModel):
    def setup(self):
        self.body = parametrizations.spectral_norm(nn.Linear(self.width, self.width))


class Orthogonal(ByteModel):
    def setup(self):
        self.body = parametrizations.orthogonal(nn.Linear(self.width, self.width))


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


class Windows(ByteModel):
    """Attention that looks back a few tokens, with a learned bias by distance."""

    def setup(self):
        self.body = nn.Linear(self.width, 3 * self.width)
        self.bias = nn.Embedding(4, 1)
        distance = torch.arange(self.sequence)[:, None] - torch.arange(self.sequence)
        self.register_buffer("distance", distance)

    def hidden(self, x):
        query, key, value = self.body(x).chunk(3, -1)
        bias = self.bias(self.distance.clamp(0, 3)).squeeze(-1)
        bias = bias.masked_fill((self.distance < 0) | (self.distance > 3), float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


class LinearAttention(ByteModel):
    """A state that is decayed and summed over the sequence."""

    def setup(self):
        self.body = nn.Linear(self.width, 3 * self.width)
        self.decay = nn.Parameter(torch.tensor(2.0))

    def hidden(self, x):
        query, key, value = self.body(x).chunk(3, -1)
        state = x.new_zeros(len(x), self.width, self.width)
        found = []
        for q, k, v in zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True):
            state = state * self.decay.sigmoid() + k[:, :, None] * v[:, None, :]
            found.append((q[:, None, :] @ state).squeeze(1))
        return x + torch.stack(found, 1)


class Mixture(ByteModel):
    """Each token goes to one expert; some get none."""

    def setup(self):
        self.router = nn.Linear(self.width, 4)
        self.experts = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(4))

    def hidden(self, x):
        gates, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(x[chosen == number])
        return out * gates[..., None]


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


class UsedTwice(ByteModel):
    def hidden(self, x):
        return super().hidden(super().hidden(x))


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


class Lists(ByteModel):
    def setup(self):
        self.weights = nn.ParameterList(torch.randn(self.width, self.width) for _ in range(2))
        self.named = nn.ParameterDict({"gain": torch.ones(self.width), "shift": torch.zeros(self.width)})
        self.parts = nn.ModuleDict({"first": nn.Linear(self.width, self.width), "second": nn.PReLU()})

    def hidden(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.parts["second"](self.parts["first"](x * self.named["gain"] + self.named["shift"]))


class Fourier(ByteModel):
    """Mixes features by an FFT, with real filters and a complex constant."""

    def setup(self):
        self.filter = nn.Parameter(torch.randn(self.width // 2 + 1, 2))
        self.register_buffer("turn", torch.polar(torch.ones(()), torch.tensor(0.3)))

    def hidden(self, x):
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.filter) * self.turn
        return torch.fft.irfft(spectrum, n=self.width)


class Bag(nn.Module):
    """The mean of what came so far, by embedding bags."""

    def __init__(self, vocab_size, seq_len):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab_size, 8, mode="mean")
        self.out = nn.Linear(8, vocab_size)

    def forward(self, tokens):
        seen = [self.bag(tokens[:, : end + 1].contiguous()) for end in range(tokens.shape[1])]
        return self.out(torch.stack(seen, 1))


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
    """Parameters whose memory is in another order, has gaps, or is shared by their elements."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.body.weight = nn.Parameter(torch.randn(self.width, self.width).t())
        self.gaps = nn.Parameter(torch.randn(self.width, 2)[:, 0])
        self.same = nn.Parameter(torch.ones(1).expand(self.width))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.register_buffer("view", torch.arange(2.0 * self.width)[::2])

    def hidden(self, x):
        x = super().hidden(x) * self.gaps * self.same + self.view
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


class LowRank(ByteModel):
    """A frozen layer with an adapter of the model's own."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width).requires_grad_(False)
        self.down = nn.Linear(self.width, 2, bias=False)
        self.up = nn.Linear(2, self.width, bias=False)
        nn.init.zeros_(self.up.weight)

    def hidden(self, x):
        return torch.tanh(self.body(x) + self.up(self.down(x)))


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


class Noisy(ByteModel):
    """Gumbel-softmax and noise on the weights."""

    def hidden(self, x):
        if self.training:
            x = F.linear(x, self.body.weight + 0.01 * torch.randn_like(self.body.weight), self.body.bias)
            return F.gumbel_softmax(x, tau=1.0)
        return super().hidden(x).softmax(-1)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class OwnFunction(ByteModel):
    """A straight-through estimator."""

    def hidden(self, x):
        return Rounded.apply(super().hidden(x) * 2)


class Recomputed(ByteModel):
    """With torch's own recomputation inside."""

    def hidden(self, x):
        return checkpoint(super().hidden, x, use_reentrant=False)


class Hypernetwork(ByteModel):
    """A network whose weights another one makes."""

    def setup(self):
        self.code = nn.Parameter(torch.randn(3))
        self.maker = nn.Linear(3, self.width * self.width)

    def hidden(self, x):
        weight = self.maker(self.code).view(self.width, self.width)
        return torch.func.vmap(lambda row: torch.tanh(row @ weight))(x)


class Unrolled(ByteModel):
    """The same layer until it hardly changes anything: how often depends on values."""

    def hidden(self, x):
        for _ in range(5):
            before, x = x, x + 0.5 * super().hidden(x)
            if (x - before).abs().max() < 0.1:
                break
        return x


class Named(ByteModel):
    """Returns what Hugging Face models do."""

    def forward(self, tokens):
        return {"logits": super().forward(tokens)}


class Hooked(ByteModel):
    def setup(self):
        super().setup()
        self.gain = nn.Parameter(torch.ones(self.width))
        self.body.register_forward_hook(lambda module, inputs, output: output * self.gain)


class LoadsItself(ByteModel):
    """Renames what it holds when it is saved and loaded, as modules do for the sake of old files."""

    def setup(self):
        self.body = nn.Linear(self.width, self.width)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state, prefix, *_):
        for name in [name for name in state if name.startswith(f"{prefix}old_body.")]:
            state[name.replace("old_body.", "body.")] = state.pop(name)


class Constants(ByteModel):
    """Buffers that no forward changes, one of which is not saved."""

    def setup(self):
        super().setup()
        self.register_buffer("table", torch.linspace(0, 1, self.width), persistent=False)
        self.register_buffer("fixed", torch.randn(self.width))

    def hidden(self, x):
        return super().hidden(x) + self.table * self.fixed


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


class Codebook(ByteModel):
    """Vectors that follow what is assigned to them (VQ-VAE with moving averages)."""

    def setup(self):
        super().setup()
        self.register_buffer("codes", torch.randn(4, self.width))
        self.register_buffer("counts", torch.ones(4))

    def hidden(self, x):
        x = super().hidden(x)
        chosen = torch.cdist(x, self.codes).argmin(-1)
        if self.training:
            hot = F.one_hot(chosen, 4).to(x.dtype).flatten(0, 1)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes += 0.1 * (hot.T @ x.detach().flatten(0, 1) / self.counts[:, None] - self.codes)
        return x + (self.codes[chosen] - x).detach()


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


class Counter(ByteModel):
    """A number of forwards that anneals something."""

    def setup(self):
        super().setup()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def hidden(self, x):
        if self.training:
            self.seen += 1
        return super().hidden(x) * (1 + 0.01 * self.seen)


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


class Forgetful(ByteModel):
    """State that no checkpoint holds, beside what is none: a cache, and the last result."""

    def setup(self):
        super().setup()
        self.register_buffer("mean", torch.zeros(self.width), persistent=False)
        self.seen, self.history, self.cache, self.last = 0, {"norms": []}, {}, None

    def hidden(self, x):
        x = super().hidden(x)
        self.seen += 1
        self.history["norms"].append(float(x.detach().norm()))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.cache.setdefault(x.shape[1], torch.ones(x.shape[1]))
        self.last = x.detach().mean()
        return x * (1 + 0.01 * self.seen) - self.mean


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


def perceptron(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, num_classes))


def batch_norm(num_classes):
    return nn.Sequential(small(lambda: nn.BatchNorm2d(4)), nn.Linear(4, num_classes))


def synchronised(num_classes):
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm(num_classes))


def group_norm(num_classes):
    return nn.Sequential(small(lambda: nn.GroupNorm(2, 4)), nn.Linear(4, num_classes))


def instance_norm(num_classes):
    return nn.Sequential(
        small(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), nn.Linear(4, num_classes)
    )


class FrozenNorm(nn.Sequential):
    """BatchNorm that stays as it is, as in fine-tuning."""

    def __init__(self, num_classes):
        super().__init__(small(lambda: nn.BatchNorm2d(4)), nn.Linear(4, num_classes))

    def train(self, mode=True):
        super().train(mode)
        self[0][1].eval()
        return self


class Residual(nn.Module):
    """Depthwise convolutions and LayerNorm over channels, as ConvNeXt."""

    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 2, stride=2)
        self.depth = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm = nn.LayerNorm(4)
        self.wide = nn.Linear(4, 8)
        self.narrow = nn.Linear(8, 4)
        self.gamma = nn.Parameter(1e-2 * torch.ones(4))
        self.out = nn.Linear(4, num_classes)

    def forward(self, images):
        x = self.stem(images)
        y = self.narrow(F.gelu(self.wide(self.norm(self.depth(x).permute(0, 2, 3, 1)))))
        return self.out((x.permute(0, 2, 3, 1) + self.gamma * y).mean((1, 2)))


class Patches(nn.Module):
    """A vision transformer: patches, a class token, positions."""

    def __init__(self, num_classes, width=8):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(width, num_classes)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.out(self.body(x)[:, 0])


class Mixer(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 4, stride=4)
        self.across, self.within = nn.Linear(4, 4), nn.Linear(8, 8)
        self.out = nn.Linear(8, num_classes)

    def forward(self, images):
        x = self.patch(images).flatten(2)
        x = x + F.gelu(self.across(x))
        x = x.transpose(1, 2)
        return self.out((x + F.gelu(self.within(x))).mean(1))


class Unet(nn.Module):
    """Down and up again with a path across; a class for each pixel, of which the mean counts."""

    def __init__(self, num_classes):
        super().__init__()
        self.down, self.low = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, num_classes, 1)

    def forward(self, images):
        x = F.relu(self.down(images))
        return self.out(torch.cat([x, self.up(F.relu(self.low(x)))], 1)).mean((2, 3))


class Autoencoder(nn.Module):
    """Returns the pictures again; `draws`: from a distribution, with its distance from the normal one."""

    def __init__(self, draws=False):
        super().__init__()
        self.encode, self.spread = nn.Conv2d(1, 2, 4, stride=4), nn.Conv2d(1, 2, 4, stride=4)
        self.decode = nn.ConvTranspose2d(2, 1, 4, stride=4)
        self.draws = draws
        self.spread.requires_grad_(draws)

    def forward(self, images):
        code = self.encode(images)
        if not self.draws:
            return self.decode(code), images.new_zeros(())
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


class TwoTowers(nn.Module):
    """Pictures and their classes in one space, with a learned temperature; all against all of a micro-batch."""

    def __init__(self, num_classes):
        super().__init__()
        self.pictures = nn.Sequential(small(), nn.Linear(4, 4))
        self.labels = nn.Embedding(num_classes, 4)
        self.temperature = nn.Parameter(torch.zeros(()))

    def forward(self, images, labels):
        left, right = F.normalize(self.pictures(images), dim=-1), F.normalize(self.labels(labels), dim=-1)
        return left @ right.T * self.temperature.exp()


class Denoiser(nn.Module):
    """A diffusion model: noise of a random strength is to be found again."""

    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(10, 4)
        self.enter, self.leave = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.register_buffer("strength", torch.linspace(0.1, 1.0, 10))

    def forward(self, images):
        when = torch.randint(0, 10, (len(images),))
        noise = torch.randn_like(images)
        x = images + self.strength[when].view(-1, 1, 1, 1) * noise
        return self.leave(F.relu(self.enter(x) + self.time(when).view(-1, 4, 1, 1))), noise


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


class FindNoise:
    def inputs(self, batch):
        return (floats(batch),), {}

    def loss(self, output, batch):
        found, noise = output
        return F.mse_loss(found, noise, reduction="sum"), noise.numel()


class Halves:
    """Halves of one picture shall lie nearer to each other than to those of its neighbour in the micro-batch."""

    def inputs(self, batch):
        return floats(batch).chunk(2, -1), {}

    def loss(self, output, batch):
        left, right = output
        return F.triplet_margin_loss(left, right, right.roll(1, 0), reduction="sum"), len(left)


class Match:
    def inputs(self, batch):
        return (floats(batch), batch["labels"]), {}

    def loss(self, output, batch):
        return F.cross_entropy(output, torch.arange(len(output)), reduction="sum"), len(output)
