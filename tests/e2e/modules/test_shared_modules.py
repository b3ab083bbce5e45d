"""Modules of the pages in Chromium."""

from __future__ import annotations

import zlib

import msgpack
import pytest
from playwright.sync_api import Page

from contracts.telemetry.items import Op
from tests.support.browser import call_module

pytestmark = pytest.mark.extended

OPS = Op.__args__  # type: ignore[attr-defined]  # typing gives Literal no public attributes


def test_page_is_delayed_until_every_stream_is_readable(modules: Page) -> None:
    shown = [{"node": 0, "stale": True}, {"node": 1, "stale": True}, {"node": 0, "stale": False}]
    shown += [{"node": 1, "entries": []}, {"node": 1, "stale": True}]
    body = """
    const sockets = [];
    class Socket extends EventTarget { constructor() { super(); sockets.push(this); } }
    [globalThis.WebSocket, globalThis.own] = [Socket, globalThis.WebSocket];
    const seen = [];
    m.connect("/ws/", { resume: () => ({}), onJob() {}, onGap() {}, onBatch() {}, onState: (name) => seen.push(name) });
    sockets[0].dispatchEvent(new Event("open"));
    const shown = async (count) => { while (seen.length < count) await new Promise((then) => setTimeout(then)); };
    for (const raw of x) sockets[0].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(raw) }));
    await shown(7);
    sockets[0].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(x[3]) })); // not taken before it closes
    sockets[0].dispatchEvent(new CloseEvent("close", { code: 1013 }));
    await new Promise((then) => setTimeout(then, 50));
    dispatchEvent(new Event("online"));
    sockets[1].dispatchEvent(new Event("open"));
    sockets[1].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(x[3]) }));
    await shown(10);
    globalThis.WebSocket = globalThis.own;
    return seen;
    """
    frames = [msgpack.packb(one) for one in shown]
    frames[2] = msgpack.packb({"deflated": zlib.compress(frames[2])})
    seen = call_module(modules, "socket.js", body, [list(frame) for frame in frames])
    assert seen == ["connecting", "live", *["delayed"] * 3, "live", "delayed", "reconnecting", "live", "live"]


def test_peak_has_a_unit_and_days_have_commas(modules: Page) -> None:
    time = {"step_s": 0.5, "model_flops": 1e10, "mfu": 0.2, "hfu": 0.2, "tokens_per_s": 2050, "parts": []}
    time |= {"interval": {"share": 0.79, "basis": "runs", "words": "from 5 runs here"}, "basis": "data sheet"}
    estimate = {"time": time, "world_size": 2, "cluster": {"name": "vm"}}
    body = "return m.timePicture(x).map((part) => part.textContent).join(' ')"
    shown = call_module(modules, "pictures/time.js", body, estimate)
    assert "MFU and HFU are relative to a peak of 50.0 GFLOP/s per rank." in shown
    assert "5,646 days" in shown
    assert "The step time range covers nine of ten runs on a host with the same load." in shown
    tiny = call_module(modules, "pictures/time.js", body, {**estimate, "model_parameters": 10**6})
    assert "MFU is relative to a peak of 50.0 GFLOP/s per rank." in tiny
    assert "HFU" not in tiny
    assert "tokens 5" not in tiny


def test_headline_and_panel_show_the_same_free_memory(modules: Page) -> None:
    stage = {"stage": 0, "memory": {"parameters": 330 * 2**20}, "memory_bytes": 330 * 2**20, "step_bytes": {}}
    cluster = {"memory_bytes": 8 * 2**30, "accelerator": "CPU"}
    time = {"step_s": 1, "interval": {"share": 0.1}, "tokens_per_s": 1}
    estimate = {"stages": [stage], "cluster": cluster, "fits": True, "peak_memory_bytes": 330 * 2**20, "time": time}
    estimate["memory_interval"] = {"share": 0.1, "words": "counted"}
    body = """
    const { headline } = await import('/js/plan/headline.js');
    return [headline(x).fits.text, m.memoryPicture(x)[0].textContent, m.memoryPicture(x).at(-1).textContent];
    """
    head, panel, note = call_module(modules, "pictures/memory.js", body, estimate)
    assert (head, panel.endswith("fits, 95% free")) == ("±10%, fits 8.00 GiB, 95% free", True)
    assert note == "Range of the predicted memory on the rank with the most memory: 297 MiB to 363 MiB, counted."
    tight = {**estimate, "cluster": {**cluster, "memory_bytes": 350 * 2**20}, "tight": True}
    head, panel, _ = call_module(modules, "pictures/memory.js", body, tight)
    assert head == "±10%, fits 350 MiB, 5% free (less than the margin of error)"
    assert panel.endswith("fits, 5% free (less than the margin of error)")


def test_search_for_an_empty_match_ends(modules: Page) -> None:
    body = """
    const worker = new Worker('/js/logs/finder.js');
    worker.postMessage({id: 1, source: 'b|', flags: 'gu', texts: ['\\u{1F600}b']});
    const hits = new Promise((told) => worker.onmessage = ({ data }) => told(data.hits));
    const late = new Promise((told) => setTimeout(told, 5000, 'goes on'));
    const found = await Promise.race([hits, late]);
    worker.terminate();
    return found;
    """
    assert call_module(modules, "rates.js", body) == [[0, [[2, 3]]]]
