"""The job form and the Planner: pictures, explanations, templates, comparison, and search."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Request, expect

from tests.support.board import Board


def test_form_shows_the_plan_of_a_published_layout(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/?template=gpt3-175b-megatron")
    panel = page.locator("#estimate")
    expect(panel.locator('[data-show="world"]')).to_have_text("1,024 ranks")
    expect(panel.locator('[data-show="parameters"]')).to_have_text("175B")
    expect(panel.locator('[data-show="micro-batch-words"]')).to_have_text("sequence")
    expect(panel.locator('[data-show="memory"]')).to_contain_text("of 79.2 GiB")
    expect(panel.locator('[data-show="traffic"]')).to_contain_text("between nodes")
    expect(panel.locator('[data-section="traffic"] [data-kind]')).to_have_text("estimate")
    assert panel.locator(".schedule rect:not(.idle)").count() == 2 * 16 * 32
    expect(page.locator("#plan-status")).to_have_text("Planning only: the trainer cannot run this job.")
    expect(page.locator("#submit")).to_be_disabled()
    page.select_option('[name="model.preset"]', "gpt3-175b")
    expect(panel.locator('[data-show="active"]')).to_have_text("vocabulary of 50,257 padded to 51,200")


@pytest.mark.extended
def test_experts_of_a_copied_model_stay_until_another_model_is_chosen(page: Page, running_board: Board) -> None:
    spec = {"model": {"preset": "mixtral-8x7b", "num_layers": 16}, "resources": {"device": "cuda"}}
    page.goto(f"{running_board.url}/jobs/new/?cluster=h100&spec={quote(json.dumps(spec))}")
    note, parameters = page.locator("#preset-note"), page.locator('#estimate [data-show="parameters"]')
    expect(note).to_have_text("Custom sizes, and kept from the copied model: a mixture of 8 experts.")
    expect(parameters).to_have_text("23.5B")
    page.select_option('[name="model.preset"]', "gpt-tiny")
    page.select_option('[name="model.preset"]', "")
    expect(note).to_have_text("Custom sizes.")
    page.select_option('[name="model.preset"]', "mixtral-8x7b")
    page.select_option('[name="model.preset"]', "")
    page.fill('[name="model.num_layers"]', "16")
    expect(parameters).to_have_text("23.5B")


UNITS = {"memory": re.compile(r" [KMGT]iB, "), "traffic": re.compile(r" [kMGT]?B, ")}


def test_every_figure_has_an_explanation(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_have_attribute("data-tone", re.compile("good|warn"))
    expect(page.locator('[data-section="traffic"] [data-kind]')).to_have_text("exact")
    for figure in ("parameters", "step time", "MFU", "memory", "traffic"):
        page.click(f'[data-explain="{figure}"]')
        dialog = page.locator("#explain[open]")
        expect(dialog.locator("h2")).to_contain_text(f"{figure} = ")
        assert dialog.locator("tbody tr").count() >= 2
        expect(dialog.locator("tbody .source").first).not_to_be_empty()
        if figure in UNITS:
            expect(dialog.locator("h2")).to_have_text(UNITS[figure])
        dialog.locator("button").click()
        expect(page.locator("#explain")).to_be_hidden()


@pytest.mark.extended
def test_explanation_is_for_the_stage_of_the_figure(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/?template=llama3-405b-16k")
    memory = page.locator('[data-head="memory"]')
    expect(memory).to_have_text("63.1 GiB")
    page.click('[data-explain="memory"]')
    expect(page.locator("#explain[open] h2")).to_contain_text("memory of a rank of stage 1 = 63.1 GiB")


def refuse_once(page: Page, path: str) -> None:
    """Answer the next request of a path like a busy planner. See `tests/jobs/planning/test_planner_processes.py`."""
    busy = {
        "errors": [{"field": "request", "message": "All 2 planner processes are busy. Try again in a few seconds."}]
    }
    page.route(f"**{path}", lambda route: route.fulfill(status=503, json=busy, headers={"Retry-After": "2"}), times=1)


@pytest.mark.extended
def test_form_retries_a_busy_planner(page: Page, running_board: Board) -> None:
    refuse_once(page, "/plan/")
    page.goto(f"{running_board.url}/jobs/new/")
    status = page.locator("#plan-status")
    expect(status).to_have_text("The planner is busy. Retrying in 2 s.")
    expect(status).to_have_attribute("data-tone", "warn")
    expect(page.locator("#estimate")).to_have_attribute("data-stale", "true")
    expect(status).to_contain_text("Fits.")
    expect(page.locator('#estimate [data-show="world"]')).to_have_text("4 ranks")


@pytest.mark.extended
def test_search_retries_a_busy_planner(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/")
    expect(page.locator('.lane[data-best="true"]')).to_have_count(1)
    refuse_once(page, "/plan/search/")
    page.click("#search")
    expect(page.locator("#search-status")).to_contain_text("fit in memory.")


@pytest.mark.extended
def test_typed_degree_counts_and_schedule_sets_its_chunks(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/?template=megatron-1t")
    expect(page.locator('[data-show="world"]')).to_have_text("3,072 ranks")
    page.fill('[data-other="layout.dp"]', "3")
    expect(page.locator('[data-show="world"]')).to_have_text("1,536 ranks")
    page.locator('label:has(input[value="interleaved_1f1b"])').click()
    expect(page.locator('[name="layout.virtual_stages"]')).to_have_value("2")
    expect(page.locator('[data-show="schedule"]')).to_contain_text("Idle time:")


def test_planner_compares_layouts_and_adds_one_from_the_search(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/")
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(2)
    expect(lanes.nth(0)).to_contain_text("of 79.1 GiB")
    expect(page.locator('.lane[data-best="true"]')).to_have_count(1)
    expect(page.locator('.lane[data-best="true"] header')).to_contain_text("most tokens/s per rank")
    rows = [lanes.nth(place).locator("tbody th").all_text_contents() for place in range(2)]
    assert rows[0] == rows[1], "values of one quantity are on one line"
    assert "tp exposed" in rows[0]
    opened = lanes.nth(0).get_by_text("Use this layout")
    expect(opened).to_have_attribute("href", re.compile("device%22%3A%22cuda"))
    page.select_option("[name=cluster]", "cpu")
    expect(opened).to_have_attribute("href", re.compile("device%22%3A%22cpu"))
    page.select_option("[name=cluster]", "h100")
    page.fill("#s-fixed", "tp=2 zero=1")
    page.click("#search")
    expect(page.locator("#search-status")).to_contain_text("fit in memory.")
    first = page.locator(".search-results tbody tr").first
    first.get_by_text("Compare").click()
    expect(lanes).to_have_count(3)
    expect(lanes.nth(2).locator('[data-name="tp"]')).to_have_value("2")
    expect(lanes.nth(2)).to_contain_text("MFU")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(lanes).to_have_count(3)
    lanes.nth(2).locator("header button").click()
    expect(lanes).to_have_count(2)
    page.fill("#s-fixed", "colour=3")
    page.click("#search")
    expect(page.locator("#search-status")).to_contain_text("layout.colour")


@pytest.mark.extended
def test_planner_selects_software_and_keeps_that_of_the_form(page: Page, running_board: Board) -> None:
    spec = {"model": {"preset": "llama3-8b"}, "layout": {"dp": 8}, "resources": {"device": "cuda", "stack": "scaling"}}
    page.goto(f"{running_board.url}/jobs/new/?cluster=h100&spec={quote(json.dumps(spec))}")
    expect(page.locator(".plan-for .note")).to_contain_text("Change the software stack in Planner.")
    expect(page.locator("#plan-status")).to_have_attribute("data-tone", re.compile("good|warn|bad"))
    page.click("#compare")
    graphs, norms = (page.locator(f'[data-for="resources.software.{name}"]') for name in ("cuda_graphs", "fused_norms"))
    kernel = page.locator('[data-for="resources.software.attention_kernel"] label:visible')
    stack = page.locator('[name="resources.stack"]')
    expect(stack).to_have_value("scaling")
    expect(norms).to_be_visible()
    expect(graphs).to_be_hidden()
    expect(kernel).to_have_text(["default", "FlashAttention 1", "eager, unfused"])
    norms.locator("input").check()
    expect(page.locator(".lane")).to_contain_text("norms")
    stack.select_option("megatron")
    expect(norms).to_be_hidden()
    expect(kernel).to_have_text(["default", "FlashAttention 2"])
    graphs.locator("label", has_text="whole").click()
    expect(page.locator(".lane")).to_contain_text("CUDA graphs of whole layers or steps")
    page.reload()
    expect(stack).to_have_value("megatron")
    expect(page.locator(".lane")).to_contain_text("CUDA graphs of whole layers or steps")
    # Jobs run Meshboard's trainer, so the form opens without the stack.
    use = page.locator(".lane").get_by_text("Use this layout")
    expect(use).not_to_have_attribute("href", re.compile("megatron"))
    stack.select_option("ours")
    expect(graphs).to_be_hidden()


@pytest.mark.extended
def test_planner_uses_the_sizes_of_a_linked_job_until_a_model_is_chosen(page: Page, running_board: Board) -> None:
    spec = {"model": {"preset": "gpt-tiny", "num_layers": 2}, "train": {"learning_rate": 0.5}}
    linked = quote(json.dumps({"spec": spec, "cluster": "cpu"}))

    def plans(request: Request) -> bool:
        return request.method == "POST" and "/plan" in request.url

    with page.expect_request(plans) as first:
        page.goto(f"{running_board.url}/planner/#{linked}")
    requests = first.value.post_data_json
    assert requests["model"] == {"preset": "gpt-tiny", "num_layers": 2}
    hint = page.locator("#linked-settings")
    text = "Settings without a field on this page: num_layers, learning_rate. To remove these settings, choose a model."
    expect(hint).to_have_text(text)
    expect(page.locator("[name=preset] option:checked")).to_have_text("gpt-tiny with other sizes")
    with page.expect_request(plans) as second:
        page.locator("[name=preset]").select_option("llama3-8b")
    requests = second.value.post_data_json
    assert (requests["model"], "learning_rate" in requests["train"]) == ({"preset": "llama3-8b"}, False)
    expect(hint).to_be_hidden()


@pytest.mark.extended
def test_default_layouts_are_valid_and_follow_the_base(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/")
    lanes = page.locator(".lane")
    expect(lanes.locator("table")).to_have_count(2)
    expect(lanes.locator(".message")).to_have_count(0)
    page.fill("[name=ranks]", "6")
    page.fill("[name=global_batch]", "24")
    expect(lanes.nth(0).locator("tbody tr").first).to_have_text("ranks6")
    expect(lanes.locator("table")).to_have_count(2)
    expect(lanes.locator(".message")).to_have_count(0)


@pytest.mark.extended
def test_address_contains_the_form(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    assert page.url.endswith("/jobs/new/")
    page.fill("[name='train.steps']", "77")
    page.fill("[name='train.global_batch']", "12")
    page.locator("[data-for='layout.tp'] label", has_text="1").click()
    page.fill('[data-other="layout.dp"]', "3")
    page.wait_for_url(re.compile("spec=.*77"))
    expect(page.locator('[data-show="world"]')).to_have_text("3 ranks")
    page.reload()
    expect(page.locator("[name='train.steps']")).to_have_value("77")
    expect(page.locator("[data-for='layout.dp'] input:checked")).to_have_value("3")
    expect(page.locator("[data-for='layout.tp'] input:checked")).to_have_value("1")
    expect(page.locator('[data-show="world"]')).to_have_text("3 ranks")


@pytest.mark.extended
def test_choice_and_text_box_agree(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    other, chosen = page.locator('[data-other="layout.dp"]'), page.locator("[data-for='layout.dp'] input:checked")
    other.fill("3")
    expect(chosen).to_have_value("3")
    expect(page.locator("[data-for='layout.dp'] label:visible")).to_have_count(4)
    page.locator("[data-for='layout.dp'] label", has_text="2").click()
    expect(other).to_have_value("")
    expect(chosen).to_have_value("2")
    other.fill("4")
    other.blur()
    expect(other).to_have_value("")
    expect(chosen).to_have_value("4")
    other.fill("")
    other.fill("x")
    expect(page.locator("[data-for='layout.dp'] .problem")).not_to_be_empty()
    expect(other).to_have_attribute("aria-invalid", "true")


@pytest.mark.extended
def test_only_the_wrong_field_is_marked(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    page.fill("[name='train.steps']", "many")
    expect(page.locator("#plan-status")).to_have_text("Fix one problem to submit.")
    wrong = page.locator("[aria-invalid]")
    expect(wrong).to_have_count(1)
    expect(wrong).to_have_attribute("name", "train.steps")
    page.fill("[name='train.steps']", "5")
    page.fill("[name='train.warmup_steps']", "0", force=True)
    page.fill('[data-other="layout.tp"]', "3")
    expect(page.locator("[data-for='layout.tp'] .problem")).not_to_be_empty()
    expect(wrong).to_have_count(1)
    expect(wrong).to_have_attribute("data-other", "layout.tp")


@pytest.mark.extended
def test_problem_of_the_layout_disappears_when_the_layout_fits(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    problem = page.locator("[data-for='layout'] > .problem")
    page.locator("[data-for='layout.dp'] label", has_text="8").click()
    expect(problem).to_contain_text("Use fewer ranks.")
    page.locator("[data-for='layout.dp'] label", has_text="2").click()
    expect(page.locator("#plan-status")).to_contain_text("Fits.")
    expect(problem).to_be_empty()
    page.locator("[data-for='layout.tp'] label", has_text="1").click()
    reasons = page.locator("[data-for='layout.sequence_parallel'] .reasons")
    expect(reasons).to_contain_text("Unavailable: layout.sequence_parallel needs tp of 2 or more")


def test_job_that_does_not_fit_needs_a_confirmation(page: Page, running_board: Board) -> None:
    train = {"global_batch": 8, "micro_batches": 4, "seq_len": 4096, "precision": "bf16"}
    spec = {"model": {"preset": "llama3-405b"}, "layout": {"dp": 2}, "train": train, "resources": {"device": "cuda"}}
    page.goto(f"{running_board.url}/jobs/new/?spec={quote(json.dumps({'name': 'huge', **spec}))}")
    status = page.locator("#plan-status")
    expect(status).to_contain_text(
        re.compile(r"^Does not fit: .* TiB of 79\.1 GiB per rank\. No CUDA host is connected\.")
    )
    page.click("#submit")
    dialog = page.locator("#unfit-dialog")
    expect(dialog).to_contain_text("Submit a job that does not fit?")
    page.click("#unfit-cancel")
    expect(dialog).to_be_hidden()
    assert "/jobs/new/" in page.url
    page.click("#submit")
    page.click("#unfit-submit")
    page.wait_for_url(re.compile(r"/jobs/[a-z2-7]{10}/"))


@pytest.mark.extended
def test_invalid_layout_shows_the_reason(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/")
    lane = page.locator(".lane").first
    lane.locator('[data-name="tp"]').fill("3")
    expect(lane.locator(".message")).to_contain_text("divisible")
    expect(lane.locator("[aria-invalid]")).to_have_attribute("data-name", "tp")


def test_slider_updates_the_traffic_calculator_and_its_link(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/traffic/")
    expect(page.locator("#order")).to_have_text("TP > DP > PP")
    page.fill("#v-b", "1")
    page.fill("#v-s", "256")
    expect(page.locator("#classic")).to_have_text("unusual order")
    expect(page.locator("#verdict")).to_contain_text("b s = 256 tokens")
    page.goto(page.url)
    expect(page.locator("#v-s")).to_have_value("256")
    page.locator('[data-name="s"] input[type=range]').press("End")
    expect(page.locator("#order")).to_have_text("TP > DP > PP")
    page.fill("#v-k", "99")
    expect(page.locator('[data-name="k"] .problem')).to_contain_text("99")


def test_host_page_starts_and_cancels_a_calibration(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/hosts/")
    page.locator("main a[href^='/hosts/']").first.click()
    expect(page.locator("main")).to_contain_text("Not calibrated")
    host = page.url
    page.goto(f"{host}#calibrate")  # the address of the action of a verdict
    page.reload()
    expect(page.locator("#calibrate-dialog")).to_be_visible()
    page.click("#calibrate-dialog button.primary")
    expect(page.locator("main h1")).to_contain_text("calibrate")
    job = page.url
    page.goto(host)
    expect(page.locator(".page-head .actions a")).to_contain_text("Calibration")
    page.goto(job)
    page.click("#cancel")
    page.click("#cancel-dialog button.danger")
    page.wait_for_selector("#status[data-status=cancelled]")
    page.goto(host)
    expect(page.locator("#calibrate")).to_be_visible()


@pytest.mark.extended
def test_automatic_layout_follows_the_request(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/jobs/new/")
    page.check("#auto")
    page.fill("[name='layout.auto.ranks']", "2")
    expect(page.locator('[data-show="chosen"]')).to_contain_text("on 2 ranks of")
    expect(page.locator('[data-show="world"]')).to_have_text("2 ranks")
    expect(page.locator('[data-show="time"] .note')).to_contain_text(re.compile("±|factor"))
    expect(page.locator("#own-layout")).to_be_hidden()
    page.fill("[name='layout.auto.ranks']", "999")
    problem = page.locator("[data-for='layout.auto.ranks'] .problem")
    expect(problem).to_contain_text("layout.auto.ranks is 999, but the largest host has")


@pytest.mark.extended
def test_published_layouts_and_the_command_fit_on_a_phone(page: Page, running_board: Board) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{running_board.url}/jobs/new/")
    page.click(".templates > summary")
    sheet = page.locator(".templates > .sheet").bounding_box()
    assert sheet
    assert 0 <= sheet["x"] <= sheet["x"] + sheet["width"] <= 390
    page.click(".templates > summary")
    page.click("#copy-curl")
    expect(page.locator(".curl > pre")).to_contain_text("curl --fail-with-body")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


TORCHTITAN = """[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
[mystery]
knob = 1
"""


@pytest.mark.extended
def test_planner_and_form_import_the_layout_of_another_tool(page: Page, running_board: Board) -> None:
    page.goto(f"{running_board.url}/planner/")
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(2)
    panel = page.locator(".layout-import")
    panel.locator("summary").click()
    panel.locator("textarea").fill(TORCHTITAN)
    panel.get_by_role("button", name="Import layout").click()
    expect(panel.locator(".problem")).to_contain_text("Enter the number of ranks, a multiple of 8")
    panel.get_by_label("Ranks of the layout").fill("64")
    panel.get_by_role("button", name="Import layout").click()
    expect(panel.locator("[role=status]")).to_contain_text("Imported: layout of torchtitan for 64 ranks.")
    expect(panel.locator("[role=status]")).to_contain_text("Not understood: mystery.knob.")
    expect(lanes).to_have_count(1)
    expect(lanes.locator('[data-name="dp"]')).to_have_value("8")
    expect(lanes).to_contain_text("MFU")
    expect(page.locator("[name=preset]")).to_have_value("llama3-70b")
    expect(page.locator("[name=global_batch]")).to_have_value("16")
    page.goto(f"{running_board.url}/jobs/new/")
    panel.locator("summary").click()
    panel.locator("input[type=file]").set_input_files(
        {
            "name": "nd.yaml",
            "mimeType": "text/yaml",
            "buffer": b"parallelism: {dp: 2, pp: 2, tp: 2, pp_engine: 1f1b}\n"
            b"tokens: {micro_batch_size: 1, batch_accumulation_per_replica: 4, sequence_length: 64}\n",
        }
    )
    expect(panel.locator("[role=status]")).to_contain_text("Imported: layout of nanotron for 8 ranks.")
    expect(page.locator('[data-show="world"]')).to_have_text("8 ranks")
    expect(page.locator('[name="train.seq_len"]')).to_have_value("64")
    expect(page.locator('[name="train.global_batch"]')).to_have_value("8")
