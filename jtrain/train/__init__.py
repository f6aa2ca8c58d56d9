"""One run, from its config to its result."""

from typing import TYPE_CHECKING

from jtrain.io.lazy_names import lazy_names

if TYPE_CHECKING:
    from jtrain.train.answers import AnswerEvaluation as AnswerEvaluation
    from jtrain.train.answers import Verifier as Verifier
    from jtrain.train.answers import check_fits as check_fits
    from jtrain.train.answers import make_complete as make_complete
    from jtrain.train.answers import make_question as make_question
    from jtrain.train.answers import same_number as same_number
    from jtrain.train.answers import same_text as same_text
    from jtrain.train.charts import svg_chart as svg_chart
    from jtrain.train.charts import write_pictures as write_pictures
    from jtrain.train.flops import count_flops as count_flops
    from jtrain.train.flops import count_model_flops as count_model_flops
    from jtrain.train.lm_harness import JtrainLM as JtrainLM
    from jtrain.train.program import set_up as set_up
    from jtrain.train.runtime import enable_compilation_cache as enable_compilation_cache
    from jtrain.train.tasks import evaluate_tasks as evaluate_tasks
    from jtrain.train.tasks import read_tasks as read_tasks
else:
    __getattr__, __dir__ = lazy_names(__name__)
