"""Counters of the server in the Prometheus text format: our own, and those that dashboards for vLLM read.

| name | meaning |
|---|---|
| vllm:num_requests_running, vllm:num_requests_waiting | sequences that run and that wait |
| vllm:kv_cache_usage_perc | used part of the KV cache, 0 to 1 |
| vllm:prompt_tokens_total, vllm:generation_tokens_total | prefilled and generated tokens |
| vllm:spec_decode_num_draft_tokens_total | drafted tokens, with speculative decoding |
| vllm:spec_decode_num_accepted_tokens_total | accepted ones |
| vllm:request_success_total | finished sequences by `finished_reason` |
"""

from collections.abc import Mapping


def format_metrics(
    stats: Mapping[str, float],
    queue: Mapping[str, int],
    statuses: Mapping[int, int],
    finishes: Mapping[str, int],
    *,
    model: str,
) -> str:
    """`stats`: of the engine; `queue`: of the server; `statuses`, `finishes`: responses and sequences by result."""
    numbers = {f"engine_{name}": value for name, value in stats.items()}
    numbers |= {f"server_{name}": value for name, value in queue.items()}
    lines = [f"maxhydra_{name} {value:.15g}" for name, value in numbers.items()]
    lines += [f'maxhydra_server_responses{{status="{code}"}} {n}' for code, n in sorted(statuses.items())]
    label = 'model_name="' + model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'
    shared = {
        ("num_requests_running", "gauge"): stats.get("running", 0),
        ("num_requests_waiting", "gauge"): stats.get("waiting", 0),
        ("kv_cache_usage_perc", "gauge"): stats.get("pages_used", 0) / max(stats.get("pages", 1), 1),
        ("prompt_tokens_total", "counter"): stats.get("prompt_tokens_read", 0),
        ("generation_tokens_total", "counter"): stats.get("tokens_written", 0),
    }
    if "tokens_drafted" in stats:
        shared["spec_decode_num_draft_tokens_total", "counter"] = stats["tokens_drafted"]
        shared["spec_decode_num_accepted_tokens_total", "counter"] = stats["tokens_accepted"]
    for (name, kind), value in shared.items():
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{label}}} {value:.15g}"]
    lines.append("# TYPE vllm:request_success_total counter")
    for reason in ("stop", "length"):
        lines.append(f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {finishes.get(reason, 0)}')
    return "".join(f"{line}\n" for line in lines)
