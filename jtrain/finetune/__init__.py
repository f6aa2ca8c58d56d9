"""Fine-tuning: frozen weights with a small trained part."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.finetune.adapter_file import merge as merge
    from jtrain.finetune.adapter_file import read_adapter as read_adapter
    from jtrain.finetune.adapter_file import write_adapter as write_adapter
    from jtrain.finetune.adapter_file import write_peft_adapter as write_peft_adapter
    from jtrain.finetune.answers import sample_answers as sample_answers
    from jtrain.finetune.answers import until_end as until_end
    from jtrain.finetune.group_policy import GroupPolicy as GroupPolicy
    from jtrain.finetune.group_policy import describe_rollouts as describe_rollouts
    from jtrain.finetune.group_policy import init_policy as init_policy
    from jtrain.finetune.group_policy import policy_loss as policy_loss
    from jtrain.finetune.group_policy import text_reward as text_reward
    from jtrain.finetune.lora import Lora as Lora
    from jtrain.finetune.lora import build_adapter as build_adapter
else:
    __getattr__, __dir__ = lazy_names(__name__)
