"""The same models in PyTorch, compiled, in a process of its own.

Reads a number of steps from each line of its input, takes as many and writes the seconds that one
took. Its first line of output names the versions, when the step is compiled. Parameters, moments
and sums are float32, and products bfloat16 by autocast, as in ours; attention is
`scaled_dot_product_attention`.
"""

import importlib
import json
import sys
import time

torch = importlib.import_module("torch")  # of another Python than this repository's, perhaps
nn, functional = torch.nn, torch.nn.functional
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCHES = 8


class Block(nn.Module):
    """Attention, then an MLP, of GPT-2 or of a Llama."""

    def __init__(self, s):
        super().__init__()
        width, self.heads, self.kv = s["width"], s["heads"], s["kv_heads"]
        size = width // self.heads
        norm = nn.LayerNorm if s["norm"] == "layer" else nn.RMSNorm
        options = {"bias": False} if s["norm"] == "layer" else {}
        self.norm_1, self.norm_2 = norm(width, **options), norm(width, **options)
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv) * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, s["hidden"], bias=False)
        gated = s["activation"] == "swiglu"
        self.gate = nn.Linear(width, s["hidden"], bias=False) if gated else None
        self.down = nn.Linear(s["hidden"], width, bias=False)

    def forward(self, x, angles):
        """b t d to b t d."""
        b, t, d = x.shape
        size = d // self.heads
        widths = d, self.kv * size, self.kv * size
        q, k, v = self.qkv(self.norm_1(x)).split(widths, 2)
        q, k, v = (p.view(b, t, -1, size).transpose(1, 2) for p in (q, k, v))
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv != self.heads
        )
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        z = self.norm_2(x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(z), approximate="tanh"))
        return x + self.down(functional.silu(self.gate(z)) * self.up(z))


def rotate(x, cos, sin):
    """Rotate the halves of each head by its position."""
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Language(nn.Module):
    """Tokens b t to logits b t v."""

    def __init__(self, s):
        super().__init__()
        self.tokens = nn.Embedding(s["vocab"], s["width"])
        rotary = "rotary" in s["positions"]
        self.positions = None if rotary else nn.Embedding(s["context"], s["width"])
        if rotary:
            size = s["width"] // s["heads"]
            rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
            angles = torch.arange(s["context"])[:, None] * rates
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        self.blocks = nn.ModuleList(Block(s) for _ in range(s["layers"]))
        layer = s["norm"] == "layer"
        self.norm = nn.LayerNorm(s["width"], bias=False) if layer else nn.RMSNorm(s["width"])
        self.head = nn.Linear(s["width"], s["vocab"], bias=False)
        if s["tied"] == "true":
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        """Return the logits at every position."""
        x, t = self.tokens(tokens), tokens.shape[1]
        angles = (self.cos[:t], self.sin[:t]) if self.positions is None else None
        if self.positions is not None:
            x = x + self.positions(torch.arange(t, device=tokens.device))
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        short = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Identity() if same else nn.Sequential(*short)

    def forward(self, x):
        """b c h w to b o y x."""
        y = functional.relu(self.norm_1(self.one(x)))
        return functional.relu(self.norm_2(self.two(y)) + self.short(x))


def resnet18(channels, width, classes):
    """Return ResNet-18 with the first layer of the CIFAR models."""
    layers = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for block in range(2):
            outputs = width * 2**stage
            layers.append(Residual(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def cnn(image, width, classes):
    """Return two convolutions with pools, and a linear map."""
    height, wide, channels = image
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * (height // 4) * (wide // 4), classes)),
    )


def build(s):
    """Return the model, its optimizer, a batch and the norm at which gradients are clipped."""
    if s["model"] == "language":
        sizes = s["sizes"]
        model, clip = Language(sizes), 1.0
        rows = torch.randint(sizes["vocab"], (BATCHES, s["batch"], sizes["context"] + 1))
        batches = [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]
        options = {"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
        make = lambda parameters: torch.optim.AdamW(parameters, **options)
    else:
        image, width, classes = tuple(s["image"]), s["width"], s["classes"]
        clip = 0.0
        if s["model"] == "cnn":
            model = cnn(image, width, classes)
            make = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True)
        else:
            model = resnet18(image[2], width, classes)
            options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "fused": True}
            make = lambda parameters: torch.optim.SGD(parameters, **options)
        x = torch.randn(s["batch"], image[2], *image[:2]).to(memory_format=torch.channels_last)
        batches = [(x, torch.randint(classes, (s["batch"],)))]
        model = model.to(memory_format=torch.channels_last)
    model = model.to(DEVICE)
    return model, make(model.parameters()), [[x.to(DEVICE) for x in b] for b in batches], clip


def main():
    """Serve steps until the input ends."""
    torch.set_float32_matmul_precision("high")
    model, optimizer, batches, clip = build(json.loads(sys.argv[1]))

    def loss(x, targets):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(x)
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    # A CPU has the rehearsal: the compiler's graph, without its kernels.
    compiled = torch.compile(loss, backend="inductor" if DEVICE == "cuda" else "eager")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"

    def take(steps):
        start = time.perf_counter()
        for i in range(steps):
            optimizer.zero_grad(set_to_none=True)
            compiled(*batches[i % len(batches)]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    take(1)
    print(f"torch {torch.__version__}, torch.compile, {device}", flush=True)
    for line in sys.stdin:
        print(take(int(line)), flush=True)


main()
