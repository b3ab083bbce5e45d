from django.urls import path

from jobs.api import runs, views

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
    path("hosts", views.Hosts.as_view(), name="api-hosts"),
    path("hosts/<path:name>/calibrate", views.HostCalibrate.as_view(), name="api-host-calibrate"),
    path("hosts/<path:name>/give-up", views.HostGiveUp.as_view(), name="api-host-give-up"),
    path("hosts/<path:name>/profile", views.HostProfileView.as_view(), name="api-host-profile"),
    path("jobs/<str:job_id>/give-up", runs.GiveUp.as_view(), name="api-give-up"),
    path("runs", runs.Runs.as_view(), name="api-runs"),
    path("runs/<str:run>/<int:attempt>/members", runs.Members.as_view(), name="api-run-members"),
    path("runs/<str:run>/<int:attempt>/members/<int:node>/batches", runs.Batches.as_view(), name="api-run-batches"),
    path("runs/<str:run>/<int:attempt>/members/<int:node>/report", runs.Report.as_view(), name="api-run-report"),
    path("schema", views.Schema.as_view(), name="api-schema"),
]
