"""Forms derived from the models of a spec."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import QueryDict
from django.test import Client

from jobs.pages import collectives
from jobs.pages.forms import derived, spec_form
from jobs.pages.jobs import new
from planner.facts.parse_spec import parse_fields, parse_spec
from planner.facts.presets import TEMPLATES
from planner.facts.resources import STACK_OPTIONS, SoftwareSpec
from planner.facts.spec import LabSpec
from planner.facts.validation import SpecError

PAGES = {"/jobs/new/": spec_form.FIELDS, "/jobs/script/": new.SCRIPT_FIELDS, "/collectives/": collectives.FIELDS}


def posted(values: dict[str, Any]) -> QueryDict:
    """Return the values as a browser sends them, without check boxes that are not ticked."""
    sent = QueryDict(mutable=True)
    for name, value in values.items():
        field = spec_form.FIELDS.get(name) or collectives.FIELDS.get(name)
        if isinstance(value, list):
            sent.setlist(name, value)
        elif not (field and field.is_checkbox and value == "false"):
            sent[name] = value
    return sent


def filled_in(page: Any) -> QueryDict:
    """Return the fields that a browser sends for the page."""
    shown = {name: page.context["values"][name] for name in (*spec_form.FIELDS, "auto", "layout.auto.ranks")}
    hidden = re.findall(r'<input type="hidden" name="([a-z._]+)" value="([^"]*)">', page.content.decode())
    return posted({**shown, **{name: html.unescape(text) for name, text in hidden}})


@pytest.mark.parametrize("path", PAGES)
def test_form_has_every_field_of_the_models(path: str, owner: User, client: Client, settings: Any) -> None:
    settings.SLURM = {"folder": "/cluster"}  # whose fields are there only with one
    client.force_login(owner)
    page = client.get(path).content.decode()
    assert [name for name in PAGES[path] if f'name="{name}"' not in page] == []
    shown = derived.format_limits(PAGES[path])
    assert shown
    assert [limits for name, limits in shown.items() if f'data-field="{name}"' in page and limits not in page] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_form_round_trips_a_spec(name: str) -> None:
    twin = TEMPLATES[name].twin
    back = spec_form.parse_form(posted(spec_form.format_values(twin)))
    assert parse_spec({**back, "name": "x"}) == parse_spec({**twin, "name": "x"})


@pytest.mark.parametrize(
    "model",
    [
        {"preset": "mixtral-8x7b", "num_layers": 16},
        {"preset": "deepseek-v3", "num_layers": 30},
        {"preset": "llama3-8b", "rope_scaling": {"factor": 8.0, "original_max_seq_len": 8192}},
    ],
)
def test_copy_keeps_model_fields_without_a_form_field(model: dict[str, Any], owner: User, client: Client) -> None:
    spec = parse_fields({"model": model, "train": {"seq_len": 1024}})
    client.force_login(owner)
    page = client.get("/jobs/new/", {"spec": json.dumps(spec.model_dump(exclude_unset=True))})
    assert parse_fields(spec_form.parse_form(filled_in(page))).model == spec.model


def test_copy_keeps_constraints_of_an_automatic_layout(owner: User, client: Client) -> None:
    requests = {"ranks": 4, "tp": 2, "zero": [0, 1], "max_memory_bytes": 10**9}
    client.force_login(owner)
    page = client.get("/jobs/new/", {"spec": json.dumps({"layout": {"auto": requests}})})
    assert (
        "Other constraints of the copied job: max_memory_bytes 1000000000, tp 2, zero [0, 1]." in page.content.decode()
    )
    assert spec_form.parse_form(filled_in(page))["layout"] == {"auto": requests}


def test_rejects_unknown_form_sections() -> None:
    values = spec_form.format_values({"model": {"preset": "gpt-tiny", "num_layers": 2}})
    with pytest.raises(SpecError, match=r"model\.moe"):
        parse_fields(spec_form.parse_form(posted({**values, "model.moe": "{broken"})))


@pytest.mark.parametrize(
    ("stack", "sent", "shown"),
    [
        ("megatron", {"cuda_graphs": "whole", "deterministic": "true", "fused_norms": "true"}, ("whole", True)),
        ("megatron", {"cuda_graphs": "none", "dispatcher": "flex"}, None),
        ("scaling", {"cuda_graphs": "whole", "deterministic": "true"}, None),
        ("ours", {"cuda_graphs": "whole"}, None),
    ],
)
def test_form_sends_only_software_fields_of_the_stack(
    stack: str, sent: dict[str, str], shown: tuple[str, bool] | None
) -> None:
    """The page also sends fields of other stacks."""
    values = spec_form.format_values({"model": {"preset": "gpt-tiny"}, "resources": {"stack": stack}})
    form = posted(values | {f"resources.software.{name}": value for name, value in sent.items()})
    spec = spec_form.parse_form(form)
    software = parse_spec(spec).resources.software
    assert (software and (software.cuda_graphs, software.deterministic)) == shown
    back = spec_form.format_values(spec)
    assert back["resources.software.cuda_graphs"] == (shown[0] if shown else "none")
    assert spec_form.parse_form(posted(back)) == spec


def test_planner_shows_software_fields_per_stack(owner: User, client: Client) -> None:
    client.force_login(owner)
    page = client.get("/planner/").content.decode()
    for name in SoftwareSpec.model_fields:
        holder = f'<[a-z]+ class="field wide" data-for="resources.software.{name}" data-stacks="([^"]*)"[^>]* hidden'
        (stacks,) = re.findall(holder, page)
        assert stacks.split() == [stack for stack, names in STACK_OPTIONS.items() if name in names], name


def test_job_form_keeps_software_fields_of_its_link(owner: User, client: Client) -> None:
    resources = {"device": "cuda", "stack": "megatron", "software": {"cuda_graphs": "whole", "deterministic": True}}
    client.force_login(owner)
    page = client.get("/jobs/new/", {"spec": json.dumps({"resources": resources})})
    assert "The estimates assume the software stack " in page.content.decode()
    assert 'data-for="resources.stack"' not in page.content.decode()
    back = spec_form.parse_form(filled_in(page))["resources"]
    assert {name: back[name] for name in resources} == resources


def test_form_opens_from_its_query() -> None:
    specs: list[dict[str, Any]] = [
        {},
        {"model": {"preset": "llama3-8b"}, "layout": {"dp": 3, "tp": 2, "sequence_parallel": True}},
        {"model": {"preset": "gpt-tiny", "num_layers": 7}, "train": {"steps": "many", "overlap": False}},
        {"layout": {"auto": {}}},
        {"layout": {"auto": {"ranks": 4, "tp": 2}}, "name": "x y&z", "after": [], "resources": {"labels": ["a", "b"]}},
    ]
    for spec in specs:
        values = spec_form.format_values(spec)
        query = QueryDict(spec_form.format_query(spec_form.parse_form(posted(values)), "h100"))
        assert query["cluster"] == "h100"
        assert spec_form.format_values(json.loads(query["spec"])) == values
    assert spec_form.format_query(spec_form.parse_form(posted(spec_form.format_values({}))), "") == "spec=%7B%7D"


def test_unavailable_options_are_disabled_before_any_script_runs(owner: User, client: Client) -> None:
    client.force_login(owner)
    page = client.get("/jobs/new/", {"spec": json.dumps({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 1}})})
    unavailable, reasons = page.context["unavailable"], page.context["reasons"]
    assert "8" in unavailable["layout.tp"]
    assert reasons["layout.tp"]
    text = page.content.decode()
    assert '<input type="radio" name="layout.tp" value="8" disabled>' in text
    (box,) = re.findall(r'data-for="layout.zero".*?<details class="why-not"([^>]*)>', text, re.DOTALL)
    assert (box == " hidden") == ("layout.zero" not in reasons)


def test_form_round_trips_a_benchmark() -> None:
    lab = LabSpec(primitives=["barrier", "gather"], ranks=[3, 1], root=1, dtype="int32", reduce_op="max", factor=2)
    sent = posted(collectives.format_values({"lab": lab.model_dump(), "layout": {"dp": 4}}))
    assert LabSpec(**derived.parse_form(collectives.FIELDS, sent)["lab"]) == lab


def test_field_types_come_from_the_model() -> None:
    fields = spec_form.FIELDS
    assert fields["train.steps"][:3] == ("int", False, False)
    assert (fields["train.steps"].default, fields["train.steps"].limits) == (50, "1 to 100,000,000")
    assert (fields["train.learning_rate"].kind, fields["train.learning_rate"].limits) == (
        "float",
        "above 0, at most 10",
    )
    assert fields["train.resume"].optional
    assert fields["train.precision"].choices == ("fp32", "bf16", "bf16_gradients", "bf16_state", "fp8", "fp8_gradients")
    assert fields["train.compile"].is_checkbox
    assert not fields["train.overlap"].is_checkbox  # on by default: nothing sent must not mean off
    assert collectives.FIELDS["lab.ranks"][:3] == ("int", True, True)
    assert "model.moe" not in fields


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.steps", " 12 ", 12),
        ("train.steps", "1.5", "1.5"),
        ("train.steps", "9" * 31, "9" * 31),
        ("train.learning_rate", "1e-3", 0.001),
        ("train.learning_rate", "nan", "nan"),
        ("train.learning_rate", "much", "much"),
        ("resources.host", " ", None),
        ("train.overlap", "false", False),
        ("name", " my run ", "my run"),
    ],
)
def test_converts_text_or_leaves_it_for_the_parser(name: str, text: str, value: Any) -> None:
    sent = QueryDict(mutable=True)
    sent[name] = text
    section, _, last = name.rpartition(".")
    spec = derived.parse_form(spec_form.FIELDS, sent)
    assert (spec[section] if section else spec)[last] == value


def test_missing_fields_keep_defaults() -> None:
    assert derived.parse_form(spec_form.FIELDS, QueryDict()) == {}
    assert derived.parse_form(collectives.FIELDS, QueryDict("layout.dp=2")) == {"layout": {"dp": 2}}
    ticked = derived.parse_form(collectives.FIELDS, QueryDict("lab.factor=2"))
    assert ticked["lab"]["primitives"] == []  # the whole form came, and no box was ticked


def test_new_form_marks_no_field_as_changed(owner: User, client: Client) -> None:
    client.force_login(owner)
    fresh = client.get("/jobs/new/").context
    assert fresh["folds"].changed == []
    refused = client.post("/jobs/new/", {**fresh["values"], "train.seed": "7", "layout.tp": "3"}).context
    assert refused["folds"].changed == ["training"]


def test_reports_invalid_arguments_at_their_field() -> None:
    with pytest.raises(SpecError, match=r"`script\.args` cannot be split into arguments: No closing quotation"):
        derived.parse_form(new.SCRIPT_FIELDS, QueryDict("script.args='open"))


@pytest.mark.parametrize("spec", [None, 5, [], {"layout": 5}, {"train": None, "model": []}, {"name": {}, "lab": "x"}])
def test_invalid_spec_fills_the_form_with_defaults(spec: Any) -> None:
    assert spec_form.format_values(spec)["layout.dp"] == "1"
    assert spec_form.format_values(spec)["train.steps"] == "50"


def test_page_reads_the_layout_of_another_tool(owner: User, client: Client) -> None:
    client.force_login(owner)
    file = "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\ndata_parallel_shard_degree = -1\n"

    def send(body: Any) -> Any:
        return client.post("/plan/import-layout/", json.dumps(body), content_type="application/json").json()

    found = send({"text": file, "ranks": 8})
    assert (found["tool"], found["spec"]["layout"]["dp"], found["fields"]["hidden_size"]) == ("torchtitan", 8, 4096)
    assert send({"text": "parallelism: {dp: 2, pp: 1, tp: 1}"})["errors"][0]["message"].startswith(
        "`tokens.micro_batch"
    )
    (error,) = send({"text": file, "ranks": "many"})["errors"]
    assert error["field"] == "ranks"
    assert "Import layout of another tool" in client.get("/planner/").content.decode()
    assert "Import layout of another tool" in client.get("/jobs/new/").content.decode()
