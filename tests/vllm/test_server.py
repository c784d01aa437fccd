"""vLLM's own OpenAI server, in processes of its own, end to end."""

import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from harness.vllm_server import Engines, api_server, metric
from kvass.cache import KVCache
from kvass.config import Settings

Answer = dict[str, Any]


@pytest.mark.alone
def test_the_server_hits_what_another_process_stored_and_stores_within_50_ms(
    engines: Engines, smollm2: Path, place: Answer, prompts: list[list[int]], tmp_path: Path
) -> None:
    engines.ask("answers", tmp_path, model=str(smollm2), kvass=place, groups=[prompts[:1]])
    with api_server(smollm2, place) as url, KVCache.open(Settings.load(**place)) as cache:

        def ask(prompt: list[int], tokens: int) -> Any:
            body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()

        hit = ask(prompts[1], 20)
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == 384
        before = cache.stats()["host"].objects
        ask(prompts[0][::-1], 1)
        end = time.monotonic() + 0.05
        while cache.stats()["host"].objects < before + 3:
            assert time.monotonic() < end, "what was computed is not there 50 ms after the answer"
            time.sleep(0.005)
        assert metric(url, "vllm:kvass_hit_tokens") == 384
        assert metric(url, "vllm:kvass_load_bytes") > 0
