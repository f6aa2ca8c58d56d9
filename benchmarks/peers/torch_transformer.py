"""nanoGPT's model in eager PyTorch, in a process of its own.

Reads "steps" from each line of its input, takes as many and writes the milliseconds that one took,
and the milliseconds of processor time. Its first line of output names the versions.
"""

import importlib
import json
import sys
import time

torch = importlib.import_module("torch")  # of another Python than this repository's, perhaps
nn, functional = torch.nn, torch.nn.functional


class Block(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """b t d to b t d."""
        b, t, d = x.shape
        parts = self.qkv(self.norm_1(x)).split(d, 2)
        q, k, v = (p.view(b, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Tokens b t to logits b t v, the head tied to the embedding."""

    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        """Return the logits at every position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def main():
    """Serve steps until the input ends."""
    setting = json.loads(sys.argv[1])
    torch.set_num_threads(setting["threads"])
    sizes, batch = setting["sizes"], setting["batch"]
    model = Transformer(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    data = torch.randint(sizes["vocab"], (64, batch, sizes["context"] + 1))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        start, spent = time.perf_counter(), time.process_time()
        for i in range(int(line)):
            tokens = data[i % len(data)]
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        times = (time.perf_counter() - start, time.process_time() - spent)
        print(*(one / int(line) * 1e3 for one in times), flush=True)


main()
