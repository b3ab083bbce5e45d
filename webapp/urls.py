"""All routes of the web tier."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LoginView, LogoutView
from django.urls import include, path
from sesame.views import LoginView as OnceView

from jobs import host_pages, lab_pages, learn_pages, pages, script_pages

urlpatterns = [
    path("", pages.job_list, name="job-list"),
    path("jobs/new/", pages.job_new, name="job-new"),
    path("jobs/script/", script_pages.script_new, name="script-new"),
    path("jobs/<str:job_id>/", pages.job_page, name="job-detail"),
    path("jobs/<str:job_id>/cancel/", pages.job_cancel, name="job-cancel"),
    path("jobs/<str:job_id>/requeue/", pages.job_requeue, name="job-requeue"),
    path("plan/", pages.plan, name="plan"),
    path("plan/search/", pages.plan_search, name="plan-search"),
    path("plan/explain/", pages.plan_explain, name="plan-explain"),
    path("learn/", learn_pages.learn, name="learn"),
    path("learn/numbers/", learn_pages.numbers, name="learn-numbers"),
    path("lab/", lab_pages.lab, name="lab"),
    path("lab/<slug:slug>/", lab_pages.primitive, name="lab-primitive"),
    path("hosts/", host_pages.hosts, name="hosts"),
    path("hosts/<str:name>/", host_pages.host, name="host"),
    path("hosts/<str:name>/calibrate/", host_pages.calibrate, name="host-calibrate"),
    path("what-if/", pages.what_if, name="what-if"),
    path("login/", LoginView.as_view(template_name="login.html", redirect_authenticated_user=True), name="login"),
    path("login/once/", OnceView.as_view(), name="login-once"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("api/v1/", include("jobs.api.urls")),
    path("admin/", admin.site.urls),
]

handler500 = "jobs.pages.server_error"
