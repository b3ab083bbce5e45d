from django.urls import path

from jobs.api import runs, views
from jobs.hosts import api as hosts

urlpatterns = [
    path("jobs", views.Jobs.as_view(), name="api-jobs"),
    path("jobs/<str:job_id>", views.JobView.as_view(), name="api-job"),
    path("jobs/<str:job_id>/cancel", views.Cancel.as_view(), name="api-cancel"),
    path("jobs/<str:job_id>/advice", views.Advice.as_view(), name="api-advice"),
    path("jobs/<str:job_id>/requeue", views.Requeue.as_view(), name="api-requeue"),
    path("plan", views.Plan.as_view(), name="api-plan"),
    path("plan/search", views.PlanSearch.as_view(), name="api-plan-search"),
    path("plan/explain", views.PlanExplain.as_view(), name="api-plan-explain"),
    path("clusters", views.Clusters.as_view(), name="api-clusters"),
    path("templates", views.Templates.as_view(), name="api-templates"),
    path("presets", views.Presets.as_view(), name="api-presets"),
    path("hosts", hosts.Hosts.as_view(), name="api-hosts"),
    path("hosts/join", hosts.Join.as_view(), name="api-host-join"),
    path("hosts/<path:name>/calibrate", hosts.Calibrate.as_view(), name="api-host-calibrate"),
    path("hosts/<path:name>/drain", hosts.Drain.as_view(), name="api-host-drain"),
    path("hosts/<path:name>/undrain", hosts.Undrain.as_view(), name="api-host-undrain"),
    path("hosts/<path:name>/give-up", hosts.GiveUp.as_view(), name="api-host-give-up"),
    path("hosts/<path:name>/remove", hosts.Remove.as_view(), name="api-host-remove"),
    path("hosts/<path:name>/profile", hosts.Profile.as_view(), name="api-host-profile"),
    path("hosts/<path:name>", hosts.HostView.as_view(), name="api-host"),
    path("join-tokens", hosts.Tokens.as_view(), name="api-join-tokens"),
    path("join-tokens/<str:key>/revoke", hosts.RevokeToken.as_view(), name="api-join-token-revoke"),
    path("jobs/<str:job_id>/give-up", runs.GiveUp.as_view(), name="api-give-up"),
    path("runs", runs.Runs.as_view(), name="api-runs"),
    path("runs/<str:run>/<int:attempt>/members", runs.Members.as_view(), name="api-run-members"),
    path("runs/<str:run>/<int:attempt>/members/<int:node>/batches", runs.Batches.as_view(), name="api-run-batches"),
    path("runs/<str:run>/<int:attempt>/members/<int:node>/report", runs.Report.as_view(), name="api-run-report"),
    path("schema", views.Schema.as_view(), name="api-schema"),
]
