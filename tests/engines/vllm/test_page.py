"""The code of the page about vLLM runs with the names that it assumes."""

from __future__ import annotations

from typing import Any

import phalanx as px
from tests.conformance.engines import Source
from tests.docs.pages import DOCS, blocks
from tests.engines.vllm.models import load_model


def test_the_code_of_the_page_about_vllm_runs(cluster: None, models: dict[str, str]) -> None:
    code = [block for block in blocks(DOCS / "how-to" / "vllm.md") if block.language == "python"]
    with px.ResourcePool([2], use_gpu=False) as both:
        names: dict[str, Any] = {
            "pool": both[1:2],
            "trainer": px.WorkerGroup(both[0:1], Source.bind(load_model(models["endless"])), name="trainer"),
            "prompts": [[5, 6, 7], [8, 9]],
            "steps": 1,
        }
        for block in code:
            # Attention of vLLM 0.32 in bfloat16 may be an illegal instruction on CPUs with AMX.
            text = block.text.replace("serve=True", 'serve=True, dtype="float32"').replace(
                "bfloat16", "float32"
            )
            text = text.replace('tokenizer="path/of/model"', f"tokenizer={models['words']!r}")
            text = text.replace("path/of/model", models["endless"]).replace("max_tokens=512", "max_tokens=32")
            exec(compile(text, block.where, "exec"), names)
        (endpoint,) = px.engines.endpoints(names["server"])

    assert len(code) == 3
    assert endpoint.url.endswith("/v1")
    assert [one.version for one in names["answers"]] == [1, 1]
