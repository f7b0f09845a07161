"""A model that profiles of drafts are of."""

from offplan.plan import ModelRef

MODEL = ModelRef(source="test/model", headers_sha256="0" * 64, dtype="bfloat16")
