"""`kvass bench serve`, small: every figure is there, and those that no machine changes are right."""

import json
import shutil
from pathlib import Path

from kvass.bench import serve


def test_the_server_is_measured(tiny_model: str, models_path: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "long"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    said: list[str] = []
    found = serve.run(
        tmp_path, models_path, model=str(model), pairs=2, turns=4, clients=4, progress=said.append
    )
    assert len(said) == 5
    assert found["http_ttft_ratio"] > 0 and found["chat_speedup_turn20"] > 0
    assert found["chat_cached_share_min"] > 0.98
    assert found["shared_prefills"] == 1
    assert found["cross_tenant_hit_tokens"] == 0 and found["cross_tenant_ratio"] > 0
    assert found["rewarm_share"] <= 0.2 and found["warm_question_cached_share"] > 0.9
