"""Engines that behave in time like real ones but cost no compute, so that routers can be compared on a small, noisy machine.

    sim_engine.py PORT [PORT ...] [--engine llama-server|vllm] [--slots 4] [--prefill 2000] [--itl-ms 15]
                  [--slowdown 0.15] [--kv-tokens 60000] [--ram-tokens 60000] [--cancel-lag 0] [--model sim]

One engine per port, all in this process. Time is modelled step by step as a continuous-batching engine spends it: a step
carries one token for each decoding sequence and up to 512 prompt tokens, and lasts
itl x (1 + slowdown x (decoding - 1)) + prompt tokens / prefill.  A token is 4 characters.

llama-server: a sequence lives in one of `--slots` slots; a request takes the idle slot with the longest common prefix
(if above 10 % of the prompt), else the least recently used one; what a slot loses goes to a RAM cache of `--ram-tokens`; a busy
slot's tokens serve nobody else. vllm: one pool of 16-token blocks of `--kv-tokens`, shared by all, least recently used out.
More requests than slots wait inside the engine, in order, without a word, as in the real ones. Speaks /health, /props, /slots,
/metrics, /version, /v1/models, /v1/chat/completions (stream and not, `cached_tokens` in usage), GET /sim (work done, peak load).
Needs: aiohttp, uvloop.
"""

import argparse
import asyncio
import collections
import itertools
import json
import time

import uvloop
from aiohttp import web

CHARS = 4
BLOCK = 16 * CHARS


def prompt_text(body):
    parts = []
    for m in body.get("messages", []):
        c = m.get("content")
        if isinstance(c, list):
            c = "".join(p.get("text", "") for p in c)
        parts.append(f"<{m.get('role')}>{c or ''}\n")
    return "".join(parts) or str(body.get("prompt", ""))


def common(a, b):
    n, top = 0, min(len(a), len(b))
    step = 4096
    while n < top and a[n : n + step] == b[n : n + step]:
        n += step
    n = min(n, top)
    while n < top and a[n] == b[n]:
        n += 1
    return min(n, top)


class SlotCache:
    """llama-server: sequences in slots, and a RAM cache of what slots lost."""

    def __init__(self, a):
        self.slots = [{"id": i, "text": "", "busy": False, "used": 0.0} for i in range(a.slots)]
        self.ram, self.ram_chars = [], a.ram_tokens * CHARS

    def take(self, text):
        idle = [s for s in self.slots if not s["busy"]]
        if not idle:
            return None
        best = max(idle, key=lambda s: common(s["text"], text))
        hit = common(best["text"], text)
        if hit < 0.1 * len(text):
            best = min(idle, key=lambda s: s["used"])
            hit = common(best["text"], text)
        if best["text"] and hit < 0.5 * len(best["text"]):
            self.ram.append(best["text"])
        for saved in self.ram:
            n = common(saved, text)
            if n > hit and n >= 0.25 * len(saved):
                hit = n
        while sum(map(len, self.ram)) > self.ram_chars:
            self.ram.pop(0)
        best["busy"], best["text"] = True, text
        return best, hit

    def give(self, slot, text):
        slot.update(busy=False, text=text, used=time.monotonic())

    def progress(self, text, chars):
        pass


class BlockCache:
    """vLLM: one pool of hashed blocks, shared while they are computed, least recently used out."""

    def __init__(self, a):
        self.free, self.blocks, self.cap = (
            a.slots,
            collections.OrderedDict(),
            a.kv_tokens * CHARS // BLOCK,
        )

    @staticmethod
    def chain(text):
        h = 0
        for i in range(0, len(text) - BLOCK + 1, BLOCK):
            h = hash((h, text[i : i + BLOCK]))
            yield h

    def take(self, text):
        if not self.free:
            return None
        self.free -= 1
        hit = 0
        for h in self.chain(text):
            if h not in self.blocks:
                break
            self.blocks.move_to_end(h)
            hit += BLOCK
        return {"text": text}, min(hit, len(text) - 1)

    def progress(self, text, chars):
        for h in itertools.islice(self.chain(text), chars // BLOCK):
            self.blocks[h] = None
            self.blocks.move_to_end(h)
        while len(self.blocks) > self.cap:
            self.blocks.popitem(last=False)

    def give(self, _slot, text):
        self.free += 1
        self.progress(text, len(text))


class Job:
    def __init__(self, text, max_tokens):
        self.text, self.max_tokens = text, max_tokens
        self.todo = self.cached = self.made = 0
        self.slot, self.out, self.gone, self.gone_at = None, asyncio.Queue(), False, 0.0

    def leave(self):
        if not self.gone and self.made < self.max_tokens:
            self.gone, self.gone_at = True, time.monotonic()

    def stops(self, lag):
        """A client's leaving is noticed at the next token, or `lag` seconds later in prefill."""
        return self.gone and (not self.todo or time.monotonic() - self.gone_at >= lag)


class Engine:
    def __init__(self, a):
        self.a = a
        self.cache = SlotCache(a) if a.engine == "llama-server" else BlockCache(a)
        self.waiting, self.running, self.wake = collections.deque(), [], asyncio.Event()
        self.prompt = self.cached = self.generated = self.done = self.peak = self.peak_waiting = (
            self.wasted
        ) = 0

    async def run(self):
        a = self.a
        while True:
            while self.waiting:
                job = self.waiting[0]
                if job.gone:
                    self.waiting.popleft()
                    continue
                got = self.cache.take(job.text)
                if got is None:
                    break
                self.waiting.popleft()
                job.slot, hit = got
                job.cached = hit // CHARS
                job.todo = max(1, len(job.text) // CHARS - job.cached)
                self.prompt += job.todo
                self.cached += job.cached
                self.running.append(job)
            self.peak = max(self.peak, len(self.running))
            self.peak_waiting = max(self.peak_waiting, len(self.waiting))
            if not self.running:
                self.wake.clear()
                await self.wake.wait()
                continue
            budget, fed, decoding = 512, 0, [j for j in self.running if not j.todo]
            for job in self.running:
                if job.todo and budget:
                    n = min(job.todo, budget)
                    job.todo -= n
                    budget -= n
                    fed += n
                    if not job.todo:
                        decoding.append(job)
                    self.cache.progress(job.text, len(job.text) - job.todo * CHARS)
            step = fed / a.prefill
            if decoding:
                step += a.itl_ms / 1000 * (1 + a.slowdown * (len(decoding) - 1))
            await asyncio.sleep(step)
            for job in decoding:
                job.made += 1
                self.generated += 1
                job.out.put_nowait(job.made)
            for job in [j for j in self.running if j.stops(a.cancel_lag) or j.made >= j.max_tokens]:
                self.running.remove(job)
                self.done += not job.gone
                self.wasted += job.made if job.gone else 0
                self.cache.give(job.slot, job.text + "<assistant>" + "tok " * job.made)
                job.out.put_nowait(None)

    def submit(self, text, max_tokens):
        job = Job(text, max_tokens)
        self.waiting.append(job)
        self.wake.set()
        return job


def usage(job):
    return {
        "prompt_tokens": len(job.text) // CHARS,
        "completion_tokens": job.made,
        "total_tokens": len(job.text) // CHARS + job.made,
        "prompt_tokens_details": {"cached_tokens": job.cached},
    }


def app_for(a):
    routes, state = web.RouteTableDef(), {}

    @routes.post("/v1/chat/completions")
    async def chat(request):
        e, body = state["engine"], json.loads(await request.read())
        job = e.submit(prompt_text(body), int(body.get("max_tokens") or 64))
        base = {"id": f"chatcmpl-{id(job):x}", "created": 1, "model": a.model}
        try:
            if body.get("stream"):
                with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
                return await streamed(request, job, base, with_usage=with_usage)
            while await job.out.get() is not None:
                pass
            message = {"role": "assistant", "content": "tok " * job.made}
            choice = {"index": 0, "finish_reason": "length", "message": message}
            answer = {"object": "chat.completion", "usage": usage(job), "choices": [choice]}
            return web.json_response(base | answer, headers=a.headers)
        finally:
            job.leave()

    async def streamed(request, job, base, *, with_usage):
        def event(choices, **more):
            return (
                b"data: %b\n\n"
                % json.dumps(
                    base | {"object": "chat.completion.chunk", "choices": choices} | more
                ).encode()
            )

        def chunk(delta, finish=None):
            return event([{"index": 0, "delta": delta, "finish_reason": finish}])

        r = web.StreamResponse(headers={"content-type": "text/event-stream"} | a.headers)
        first = await job.out.get()
        await r.prepare(request)
        await r.write(chunk({"role": "assistant", "content": None}))
        while first is not None:
            await r.write(chunk({"content": "tok "}))
            first = await job.out.get()
        await r.write(chunk({}, "length"))
        if with_usage:
            await r.write(event([], usage=usage(job)))
        await r.write(b"data: [DONE]\n\n")
        return r

    @routes.get("/{path:.*}")
    async def get(request):
        e, path = state["engine"], "/" + request.match_info["path"]
        busy, waiting = len(e.running), len(e.waiting)
        if path == "/health":
            return web.json_response({"status": "ok"}, headers=a.headers)
        if path == "/v1/models":
            owner = "vllm" if a.engine == "vllm" else "llamacpp"
            return web.json_response(
                {
                    "object": "list",
                    "data": [
                        {
                            "id": a.model,
                            "object": "model",
                            "created": 1,
                            "owned_by": owner,
                            "max_model_len": 32768,
                            "meta": {"n_ctx": 32768},
                        }
                    ],
                },
                headers=a.headers,
            )
        if path == "/sim":
            return web.json_response(
                {
                    k: getattr(e, k)
                    for k in (
                        "prompt",
                        "cached",
                        "generated",
                        "done",
                        "peak",
                        "peak_waiting",
                        "wasted",
                    )
                }
                | {"running": busy, "waiting": waiting}
            )
        if a.engine == "vllm":
            if path == "/version":
                return web.json_response({"version": "0.32.0"}, headers=a.headers)
            if path == "/metrics":
                used = min(1, len(e.cache.blocks) / e.cache.cap)
                lab = f'{{engine="0",model_name="{a.model}"}}'
                return web.Response(
                    text="".join(
                        f"{n}{lab} {v}\n"
                        for n, v in (
                            ("vllm:num_requests_running", busy),
                            ("vllm:num_requests_waiting", waiting),
                            ("vllm:kv_cache_usage_perc", used),
                            ("vllm:num_preemptions_total", 0),
                            ("vllm:prefix_cache_queries_total", e.prompt + e.cached),
                            ("vllm:prefix_cache_hits_total", e.cached),
                        )
                    )
                )
        else:
            if path == "/props":
                return web.json_response(
                    {
                        "total_slots": a.slots,
                        "build_info": "b0-sim",
                        "is_sleeping": False,
                        "endpoint_slots": True,
                        "endpoint_metrics": True,
                        "model_path": a.model,
                        "default_generation_settings": {"n_ctx": 32768},
                    },
                    headers=a.headers,
                )
            if path == "/slots":
                return web.json_response(
                    [
                        {
                            "id": s["id"],
                            "n_ctx": 32768,
                            "is_processing": s["busy"],
                            "n_prompt_tokens": len(s["text"]) // CHARS,
                        }
                        for s in e.cache.slots
                    ],
                    headers=a.headers,
                )
            if path == "/metrics":
                return web.Response(
                    text=f"llamacpp:requests_processing {busy}\nllamacpp:requests_deferred {waiting}\n"
                    f"llamacpp:prompt_tokens_total {e.prompt}\n"
                    f"llamacpp:prompt_tokens_cached_total {e.cached}\n",
                    headers=a.headers,
                )
        return web.json_response(
            {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}},
            status=404,
        )

    async def start(_app):
        state["engine"] = Engine(a)
        task = asyncio.ensure_future(state["engine"].run())
        yield
        task.cancel()

    app = web.Application(client_max_size=1 << 28)
    app.add_routes(routes)
    app.cleanup_ctx.append(start)
    return app


async def main():
    p = argparse.ArgumentParser()
    p.add_argument("ports", type=int, nargs="+")
    p.add_argument("--engine", choices=["llama-server", "vllm"], default="llama-server")
    p.add_argument("--slots", type=int, default=4)
    p.add_argument("--prefill", type=float, default=2000)
    p.add_argument("--itl-ms", type=float, default=15)
    p.add_argument("--slowdown", type=float, default=0.15)
    p.add_argument("--kv-tokens", type=int, default=60000)
    p.add_argument("--ram-tokens", type=int, default=60000)
    p.add_argument(
        "--cancel-lag",
        type=float,
        default=0,
        help="seconds a hang-up goes unnoticed in prefill (llama-server: 1 or more)",
    )
    p.add_argument("--model", default="sim")
    a = p.parse_args()
    a.headers = {"Server": "llama.cpp"} if a.engine == "llama-server" else {"Server": "uvicorn"}
    for port in a.ports:
        runner = web.AppRunner(app_for(a), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


uvloop.run(main())
