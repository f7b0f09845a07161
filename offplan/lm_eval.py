"""``--model offplan`` of lm_eval, which evaluates a plan's model by its session.

``python -m offplan.lm_eval run --model offplan --model_args plan=plan.yaml --tasks TASK`` is
lm_eval's command line with that model in it. lm_eval looks for models in no other package.
"""

import sys
from importlib.util import find_spec
from typing import Any

if __name__ == "__main__" and find_spec("lm_eval") is None:
    sys.exit("offplan: found no lm_eval, which evaluates; install it: pip install 'lm_eval[hf]'")

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import offplan
from offplan.library.planned import open_planned_model
from offplan.runtime.prompts import load_tokenizer


@register_model("offplan")
class OffplanLM(HFLM):
    """A plan's model, whose logits of all positions come of one prompt pass."""

    def __init__(
        self,
        plan: str,
        model: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        **options: Any,
    ) -> None:
        """Load what the file ``plan`` says; ``model`` is read instead of where the plan says.

        ``device`` is ``open_session``'s, or the CPU where there is no GPU, since lm_eval names one
        by itself. ``batch_size`` is the plan's where it is left out, and ``options`` are those of
        lm_eval's own class. Raises what ``open_session`` raises.
        """
        loaded = offplan.load_plan(plan)
        found = open_planned_model(loaded, model)
        is_here = device == "cpu" or (torch.cuda.is_available() and str(device).startswith("cuda"))
        chosen = device if is_here else None
        session = offplan.open_session(loaded, model=found, device=chosen)
        super().__init__(
            pretrained=offplan.OffplanForCausalLM(session),
            backend="causal",
            tokenizer=load_tokenizer(found),
            max_length=loaded.workload.context,
            batch_size=loaded.workload.batch if batch_size in (None, 1, "1") else batch_size,
            **options,
        )


if __name__ == "__main__":
    cli_evaluate()
