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
    choices = serializers.DictField(help_text="{field: {option: reason}} for options that cannot be chosen")


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
