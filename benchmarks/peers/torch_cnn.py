"""The small CNN of benchmarks/cnn_step.py in eager PyTorch, in a process of its own.

Reads "steps" from each line of its input, takes as many and writes the milliseconds that one took,
and the milliseconds of processor time. Its first line of output names the versions.
"""

import importlib
import json
import sys
import time

torch = importlib.import_module("torch")  # of another Python than this repository's, perhaps
nn, functional = torch.nn, torch.nn.functional


class CNN(nn.Module):
    """Images b 1 28 28 to logits b 10."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, 32), (32, 64)))
        self.linear = nn.Linear(7 * 7 * 64, 10)

    def forward(self, x):
        """Return the logits."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return self.linear(x.flatten(1))


def main():
    """Serve steps until the input ends."""
    setting = json.loads(sys.argv[1])
    torch.set_num_threads(setting["threads"])
    model, batch = CNN(), setting["batch"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = torch.randn(8, batch, 1, 28, 28)
    labels = torch.randint(10, (8, batch))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for line in sys.stdin:
        start, spent = time.perf_counter(), time.process_time()
        for i in range(int(line)):
            loss = functional.cross_entropy(model(images[i % 8]), labels[i % 8])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        times = (time.perf_counter() - start, time.process_time() - spent)
        print(*(one / int(line) * 1e3 for one in times), flush=True)


main()
