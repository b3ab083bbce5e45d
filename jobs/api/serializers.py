"""Shapes of the API's answers, for the OpenAPI document. What goes in is described by `jobs.api.schema`."""

from __future__ import annotations

from rest_framework import serializers

from jobs.api.schema import LayoutField, ModelField, SpecField
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
    layout = LayoutField()
    world_size = serializers.IntegerField()
    created = serializers.DateTimeField()
    changed = serializers.DateTimeField()


class JobSerializer(BriefSerializer):
    """A job in full. Bytes are payload bytes; times are ISO 8601 with zone."""

    finished = serializers.BooleanField()
    engine = serializers.CharField(help_text="who launched it: hosts, or elsewhere for a run that reports itself")
    host = serializers.CharField(allow_null=True)
    exit = serializers.DictField(allow_null=True, help_text="how the current attempt ended")
    note = serializers.CharField(allow_blank=True, help_text="what its host wants known of it, such as a stopped rank")
    history = serializers.ListField(child=serializers.DictField())
    spec = SpecField()
    estimate = serializers.DictField()
    chosen = serializers.DictField(
        allow_null=True,
        help_text='where the layout was "auto": what was asked, why this one, and the runners-up; null elsewhere',
    )
    reported = serializers.DictField(
        allow_null=True, help_text="of a run that somebody launched elsewhere: its command and tags; null of others"
    )


class AdviceSerializer(serializers.Serializer[object]):
    """What one other choice would have made of a run. Times in seconds of a step."""

    text = serializers.CharField(help_text="the first option and its reason in a sentence, or that there is none")
    host = serializers.CharField()
    cluster = serializers.CharField()
    steps = serializers.IntegerField(help_text="that were timed; their median is step_s")
    step_s = serializers.FloatField()
    predicted_s = serializers.FloatField(help_text="as the job was submitted")
    interval = serializers.DictField(help_text="how far off the prediction may be, as told at submit")
    parts = serializers.ListField(
        child=serializers.DictField(),
        help_text="predicted_s as submitted; measured_at_most_s of an axis' collectives, null where nothing was "
        "measured; apportioned_s of the measured step, an estimate",
    )
    options = serializers.ListField(
        child=serializers.DictField(),
        help_text="change, layout, micro_batches, step_s, faster (share), memory_bytes, because and text; best first",
    )
    unsure = serializers.ListField(
        child=serializers.DictField(),
        help_text="as options, but no advice: they gain less than the estimate is sure of",
    )


class PlanSerializer(serializers.Serializer[object]):
    """What a spec would cost; `estimate` is null while it has problems."""

    estimate = serializers.DictField(allow_null=True)
    problems = ErrorSerializer(many=True)
    not_runnable = ErrorSerializer(many=True, help_text="fields that can be planned, but not run yet")
    choices = serializers.DictField(help_text="{field: {option: reason}} for options that cannot be chosen")
    suggestions = serializers.ListField(
        child=serializers.DictField(), required=False, help_text="where it does not fit: what would, one choice away"
    )
    chosen = serializers.DictField(
        required=False, allow_null=True, help_text='what took the place of a layout "auto", and why'
    )
    timeline = serializers.DictField(required=False, allow_null=True, help_text="the pipeline schedule as cells")
    matrix = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField()),
        required=False,
        allow_null=True,
        help_text="[sender][receiver] algorithmic bytes of a step, for up to 64 ranks",
    )


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


class ExplanationSerializer(serializers.Serializer[object]):
    figure = serializers.CharField()
    value = serializers.FloatField()
    unit = serializers.CharField(allow_blank=True)
    kind = serializers.CharField(help_text="counted, exact or estimated")
    terms = serializers.ListField(child=serializers.DictField())


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
    model = ModelField()


class HostSerializer(serializers.Serializer[object]):
    name = serializers.CharField()
    device = serializers.CharField()
    device_name = serializers.CharField()
    slots = serializers.IntegerField()
    free_slots = serializers.IntegerField()
    drained = serializers.BooleanField()
    note = serializers.CharField(allow_blank=True, help_text="what it wants known, such as jobs that run as root")
    last_seen = serializers.DateTimeField()
    calibrated = serializers.DateTimeField(allow_null=True, help_text="when it was last measured")


class GivenUpSerializer(serializers.Serializer[object]):
    lost = serializers.IntegerField(help_text="attempts that were lost with it")
