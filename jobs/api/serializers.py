"""Shapes of the API's answers, for the OpenAPI document. What goes in is `planner.spec.JobSpec`."""

from __future__ import annotations

from rest_framework import serializers

from jobs.models import Status


class ErrorSerializer(serializers.Serializer[object]):
    field = serializers.CharField(help_text="dotted field of the spec, or 'request'")
    message = serializers.CharField()


class ErrorsSerializer(serializers.Serializer[object]):
    """Every refusal."""

    errors = ErrorSerializer(many=True)  # type: ignore[assignment]  # the API's name, whatever DRF keeps there


class BriefSerializer(serializers.Serializer[object]):
    """One job of a list."""

    id = serializers.CharField()
    name = serializers.CharField()
    owner = serializers.CharField()
    status = serializers.ChoiceField(choices=Status.choices)
    attempt = serializers.IntegerField()
    priority = serializers.IntegerField()
    wait_reason = serializers.CharField(allow_blank=True, help_text="why a queued job waits")
    layout = serializers.DictField()
    world_size = serializers.IntegerField()
    created = serializers.DateTimeField()
    changed = serializers.DateTimeField()


class JobSerializer(BriefSerializer):
    """A job in full. Bytes are payload bytes; times are ISO 8601 with zone."""

    finished = serializers.BooleanField()
    host = serializers.CharField(allow_null=True)
    exit = serializers.DictField(allow_null=True, help_text="how the current attempt ended")
    history = serializers.ListField(child=serializers.DictField())
    spec = serializers.DictField()
    estimate = serializers.DictField()


class PlanSerializer(serializers.Serializer[object]):
    """What a spec would cost; `estimate` is null while it has problems."""

    estimate = serializers.DictField(allow_null=True)
    problems = ErrorSerializer(many=True)
    not_runnable = ErrorSerializer(many=True, help_text="fields that can be planned, but not run yet")
    choices = serializers.DictField(help_text="{field: {option: reason}} for options that cannot be chosen")
    suggestions = serializers.ListField(
        child=serializers.DictField(), required=False, help_text="where it does not fit: what would, one choice away"
    )
    timeline = serializers.DictField(required=False, allow_null=True, help_text="the pipeline schedule as cells")
    matrix = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        required=False,
        allow_null=True,
        help_text="[sender][receiver] algorithmic bytes of a step, for up to 64 ranks",
    )


class SearchSerializer(serializers.Serializer[object]):
    """What to search. The layout in `spec` is ignored: `fixed` holds what must stay."""

    spec = serializers.DictField(help_text="model, train and resources of a job spec")
    ranks = serializers.IntegerField(min_value=1, max_value=65536)
    cluster = serializers.CharField(required=False, help_text="a name of /clusters")
    fixed = serializers.DictField(required=False, help_text="layout fields with the value they must have")
    max_micro_batch = serializers.IntegerField(required=False, min_value=1, max_value=1024)
    max_memory_bytes = serializers.IntegerField(required=False, min_value=1, max_value=2**60)
    runnable = serializers.BooleanField(required=False, help_text="only layouts that can be submitted today")
    limit = serializers.IntegerField(required=False, min_value=1, max_value=100)


class SearchResultSerializer(serializers.Serializer[object]):
    """The best layouts by time; the Pareto front of time and memory; why neighbours of the first were not taken."""

    best = serializers.ListField(child=serializers.DictField())
    pareto = serializers.ListField(child=serializers.DictField())
    neighbours = serializers.ListField(child=serializers.DictField())
    considered = serializers.IntegerField()
    fitting = serializers.IntegerField()
    refused = serializers.DictField(child=serializers.IntegerField(), help_text="how many layouts, by reason")
    seconds = serializers.FloatField()
    complete = serializers.BooleanField(help_text="false when the time allowed ended the search")
    cluster = serializers.DictField()


class ExplainSerializer(serializers.Serializer[object]):
    """A spec, and the pipeline stage whose rank is explained."""

    spec = serializers.DictField()
    cluster = serializers.CharField(required=False)
    stage = serializers.IntegerField(required=False, min_value=0)


class ExplanationSerializer(serializers.Serializer[object]):
    figure = serializers.CharField()
    value = serializers.FloatField()
    unit = serializers.CharField(allow_blank=True)
    kind = serializers.CharField(help_text="counted, exact or estimated")
    terms = serializers.ListField(child=serializers.DictField())


class ClusterSerializer(serializers.Serializer[object]):
    """Hardware; see planner.cluster for each field and its unit."""

    id = serializers.CharField()
    name = serializers.CharField()
    device = serializers.CharField()
    accelerator = serializers.DictField()
    per_node = serializers.IntegerField()
    node = serializers.DictField()
    network = serializers.DictField()
    base_s = serializers.FloatField()
    basis = serializers.CharField()


class TemplateSerializer(serializers.Serializer[object]):
    id = serializers.CharField()
    title = serializers.CharField()
    source = serializers.CharField()  # type: ignore[assignment]  # the API's name, whatever DRF keeps there
    cluster = serializers.CharField()
    spec = serializers.DictField()
    twin = serializers.DictField()


class PresetSerializer(serializers.Serializer[object]):
    name = serializers.CharField()
    description = serializers.CharField()
    parameters = serializers.IntegerField()
    model = serializers.DictField()


class HostSerializer(serializers.Serializer[object]):
    name = serializers.CharField()
    device = serializers.CharField()
    device_name = serializers.CharField()
    slots = serializers.IntegerField()
    free_slots = serializers.IntegerField()
    drained = serializers.BooleanField()
    last_seen = serializers.DateTimeField()
    calibrated = serializers.DateTimeField(allow_null=True, help_text="when it was last measured")


class ProfileSerializer(serializers.Serializer[object]):
    """A calibration; see planner.profile for each point and its unit."""

    version = serializers.IntegerField()
    device = serializers.CharField()
    device_name = serializers.CharField()
    torch_version = serializers.CharField()
    cores = serializers.IntegerField()
    slots = serializers.IntegerField()
    memory_bytes = serializers.IntegerField()
    measured_at = serializers.DateTimeField()
    gemm = serializers.ListField(child=serializers.DictField())
    stream = serializers.ListField(child=serializers.DictField())
    layers = serializers.ListField(child=serializers.DictField())
    ends = serializers.ListField(child=serializers.DictField())
    optimizer = serializers.ListField(child=serializers.DictField())
    collectives = serializers.ListField(child=serializers.DictField())
