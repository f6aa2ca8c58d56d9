"""Answers to additions, sampled from the model itself and rewarded by a function (GRPO)."""

import functools
from collections.abc import Iterator

import jtrain as jt
from experiments.additions import AdditionsConfig, right_answers
from jtrain.data import InOrder, Shuffled, fingerprint
from jtrain.finetune import GroupPolicy, describe_rollouts, init_policy, policy_loss
from jtrain.models import check_vocabulary
from jtrain.train import make_complete
from jtrain.types import Extra, Key, Params, Placement


@jt.configclass
class Config(AdditionsConfig):
    """A transformer that is rewarded for right answers; a row of a batch is a question."""

    policy: GroupPolicy = GroupPolicy()
    """How answers are sampled and learned from."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Return the values that conflict."""
        yield from super().problems()
        yield from self.policy.problems()
        if self.lora.dropout:
            yield (
                "lora.dropout",
                f"is {self.lora.dropout} and draws by row of a batch, of which each is a group of "
                "answers here; set lora.dropout=0",
            )

    def build(self, place: Placement) -> jt.Experiment:
        """Build the questions, the network and the loss that samples answers."""
        task = self.data.build()
        check_vocabulary(self.model.pretrained, task.vocabulary, option="data.tokenizer")
        network = self.model.for_tokens(len(task.vocabulary))
        model, (question, answer) = network.build(place), task.sizes
        reward = functools.partial(right_answers, end=task.end)

        def sample(params: Params, extra: Extra, key: Key) -> str:
            del params, key
            return describe_rollouts(extra["rollouts"], task.vocabulary, task.end)

        return jt.Experiment(
            init=model.init,
            init_extra=init_policy(self.policy, question=question, answer=answer),
            dims=model.dims,
            loss=policy_loss(model, reward, self.policy, task.end),
            train=Shuffled(task.train, size=self.batch, seed=self.seed),
            valid=InOrder(task.valid, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer,
            model=model,
            tokens=self.policy.group * (question + answer),
            tokenizer=fingerprint(task.vocabulary),
            sample=sample,
            complete=make_complete(network.build, task.vocabulary, stop=[task.end]),
        )
