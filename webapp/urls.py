"""Routes of the web tier."""

from __future__ import annotations

from allauth.account.views import reauthenticate
from django.contrib import admin
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import LogoutView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.templatetags.static import static
from django.urls import include, path
from django.views.generic import RedirectView

from jobs.api import plan_views
from jobs.pages import (
    account,
    collectives,
    hosts,
    imports,
    notifications,
    operations,
    overview,
    planner,
    projects,
    queue,
)
from jobs.pages.jobs import compare, history, job_page, listing, new
from jobs.people import sign_on
from webapp import views
from webapp.admin_theme import MARK
from webapp.login import (
    AdminLoginView,
    BoardLoginView,
    LinkLoginView,
    account_closed,
    limit_logins,
    login_cancelled,
    signup_closed,
)


def icon(_request: HttpRequest) -> HttpResponse:
    """Redirect to the icon. Browsers request it next to JSON, which cannot name one."""
    return redirect(static(MARK))


login = BoardLoginView.as_view()

urlpatterns = [
    path("", listing.job_list, name="job-list"),
    path("overview/", overview.overview, name="overview"),
    path("compare/", compare.compare, name="compare"),
    path("find/", overview.find, name="find"),
    path("jobs/", RedirectView.as_view(pattern_name="job-list", query_string=True)),
    path("jobs/act/", listing.jobs_act, name="jobs-act"),
    path("jobs/new/", new.job_new, name="job-new"),
    path("jobs/script/", new.script_new, name="script-new"),
    path("jobs/<str:job_id>/", job_page.job_page, name="job-detail"),
    path("jobs/<str:job_id>/timeline/", job_page.timeline_page, name="job-timeline"),
    path("jobs/<str:job_id>/prediction/", job_page.job_prediction, name="job-prediction"),
    path("jobs/<str:job_id>/cancel/", job_page.job_cancel, name="job-cancel"),
    path("jobs/<str:job_id>/end-mail/", notifications.end_mail, name="job-end-mail"),
    path("jobs/<str:job_id>/give-up/", job_page.job_mark_lost, name="job-give-up"),
    path("jobs/<str:job_id>/smaller/", job_page.job_run_smaller, name="job-run-smaller"),
    path("jobs/<str:job_id>/check/", job_page.job_check, name="job-check"),
    path("jobs/<str:job_id>/requeue/", job_page.job_requeue, name="job-requeue"),
    path("jobs/<str:job_id>/history/", history.index, name="job-history"),
    path("jobs/<str:job_id>/history/tensorboard/", history.tensorboard, name="job-tensorboard"),
    path("jobs/<str:job_id>/history/snapshot/", history.snapshot, name="job-snapshot"),
    path("jobs/<str:job_id>/history/steps/slow/", history.slow_steps, name="job-slow-steps"),
    path("jobs/<str:job_id>/history/<str:table>/", history.table, name="job-history-table"),
    path("import/", imports.imports, name="imports"),
    path("import/begin/", imports.begin, name="import-begin"),
    path("import/<str:key>/", imports.import_page, name="import"),
    path("import/<str:key>/data/", imports.data, name="import-data"),
    path("import/<str:key>/delete/", imports.delete, name="import-delete"),
    path("import/<str:key>/files/<int:place>/", imports.part, name="import-part"),
    path("import/<str:key>/progress/", imports.progress, name="import-progress"),
    path("import/<str:key>/read/", imports.finish, name="import-read"),
    path("plan/", planner.plan, name="plan"),
    path("plan/search/", planner.search, name="plan-search"),
    path("plan/explain/", planner.explain, name="plan-explain"),
    path("planner/", planner.page, name="planner"),
    path("plan/import-model/", planner.import_config, name="plan-config"),
    path("plan/import-layout/", planner.import_layout, name="plan-layout"),
    path("planner/traffic/", planner.traffic_calculator, name="traffic-calculator"),
    path("planner/traffic/numbers/", planner.traffic_calculator_numbers, name="traffic-calculator-numbers"),
    path("collectives/", collectives.collectives, name="collectives"),
    path("collectives/<slug:slug>/", collectives.collective, name="collective"),
    path("metrics", operations.metrics, name="metrics"),
    path("notifications/", notifications.notifications, name="notifications"),
    path("projects/<str:project>/webhooks/", notifications.list_webhooks, name="webhooks"),
    path("projects/<str:project>/webhooks/make/", notifications.make, name="webhook-make"),
    path("projects/<str:project>/webhooks/<str:key>/", notifications.webhook, name="webhook"),
    path("projects/<str:project>/webhooks/<str:key>/change/", notifications.change, name="webhook-change"),
    path("projects/<str:project>/webhooks/<str:key>/delete/", notifications.delete, name="webhook-delete"),
    path("projects/<str:project>/webhooks/<str:key>/ping/", notifications.ping, name="webhook-ping"),
    path("projects/<str:project>/webhooks/<str:key>/rotate/", notifications.rotate, name="webhook-rotate"),
    path(
        "projects/<str:project>/webhooks/<str:key>/deliveries/<str:delivery>/again/",
        notifications.redeliver,
        name="webhook-redeliver",
    ),
    path("queue/", queue.queue, name="queue"),
    path("queue/act/", queue.act, name="queue-act"),
    path("queue/move/", queue.move, name="queue-move"),
    path("queue/pause/", queue.pause, name="queue-pause"),
    path("queue/audit/", operations.audit, name="audit"),
    path("queue/audit/export/", operations.audit_export, name="audit-export"),
    path("hosts/", hosts.hosts, name="hosts"),
    path("hosts/<path:name>/calibrate/", hosts.calibrate, name="host-calibrate"),
    path("hosts/<path:name>/drain/", hosts.drain, name="host-drain"),
    path("hosts/<path:name>/undrain/", hosts.undrain, name="host-undrain"),
    path("hosts/<path:name>/give-up/", hosts.mark_lost, name="host-give-up"),
    path("hosts/<path:name>/remove/", hosts.remove, name="host-remove"),
    path("join-tokens/", hosts.make_token, name="join-token-new"),
    path("join-tokens/<str:key>/revoke/", hosts.revoke_token, name="join-token-revoke"),
    path("hosts/<path:name>/", hosts.host, name="host"),
    path("account/", account.account, name="account"),
    path("account/tokens/", account.make_token, name="account-token-new"),
    path("account/tokens/<str:key>/revoke/", account.revoke_token, name="account-token-revoke"),
    path("account/password/", limit_logins(account.change_password), name="account-password"),
    path("projects/", projects.index, name="projects"),
    path("projects/<str:name>/", projects.project, name="project"),
    path("projects/<str:name>/quota/", projects.set_quota, name="project-keep-to"),
    path("projects/<str:name>/members/", projects.set_role, name="project-set-role"),
    path("projects/<str:name>/members/remove/", projects.remove_member, name="project-remove-member"),
    path("projects/<str:name>/invitations/", projects.invite, name="project-invite"),
    path("projects/<str:name>/invitations/revoke/", projects.revoke_invitation, name="project-revoke-invitation"),
    path("projects/<str:name>/variables/", projects.set_variable, name="project-set-variable"),
    path("projects/<str:name>/variables/remove/", projects.remove_variable, name="project-remove-variable"),
    path("invitations/", limit_logins(projects.invitation), name="invitation"),
    # Addresses of earlier versions, which links and bookmarks still have.
    path("what-if/", RedirectView.as_view(pattern_name="planner", permanent=True, query_string=True)),
    path("lab/", RedirectView.as_view(pattern_name="collectives", permanent=True, query_string=True)),
    path("lab/<slug:slug>/", RedirectView.as_view(pattern_name="collective", permanent=True, query_string=True)),
    path("learn/", RedirectView.as_view(pattern_name="traffic-calculator", permanent=True, query_string=True)),
    path("docs/", views.serve_page, name="docs"),
    path("docs/<path:path>", views.serve_page, name="docs-file"),
    path("login/", limit_logins(login), name="login"),
    path("login/once/", login_not_required(LinkLoginView.as_view()), name="login-once"),
    path("login/again/", limit_logins(reauthenticate), name="account_reauthenticate"),
    path(
        "login/oidc/<str:provider_id>/login/", limit_logins(sign_on.begin_sign_on, "GET"), name="openid_connect_login"
    ),
    path("login/oidc/<str:provider_id>/login/callback/", sign_on.finish_sign_on, name="openid_connect_callback"),
    path("login/cancelled/", login_not_required(login_cancelled), name="socialaccount_login_cancelled"),
    path("login/closed/", login_not_required(account_closed), name="account_inactive"),
    path("login/new/", login_not_required(signup_closed), name="socialaccount_signup"),
    path("logout/", LogoutView.as_view(), name="logout"),
    # The same by the names that django-allauth knows them by.
    path("login/", limit_logins(login), name="account_login"),
    path("logout/", LogoutView.as_view(), name="account_logout"),
    path("account/", account.account, name="socialaccount_connections"),
    path("account/two-factor/", RedirectView.as_view(pattern_name="account"), name="mfa_index"),
    path("account/two-factor/", include("allauth.mfa.urls")),
    path("account/sign-on/<int:key>/remove/", account.remove_sign_on, name="account-sign-on-remove"),
    path("account/sessions/<int:key>/end/", account.end_session, name="account-session-end"),
    path("api/v1/lab/primitives", plan_views.PrimitivesView.as_view(), name="api-primitives"),
    path("api/v1/lab/primitives/<str:name>", plan_views.PrimitiveView.as_view(), name="api-primitive"),
    path("api/v1/", include("jobs.api.urls")),
    path("admin/login/", limit_logins(AdminLoginView.as_view())),
    # The account page limits and records password changes, and lists sessions.
    path("admin/password_change/", RedirectView.as_view(pattern_name="account")),
    path("admin/", admin.site.urls),
    path("favicon.ico", icon),
]

handler400 = "webapp.views.bad_request"
handler403 = "webapp.views.permission_denied"
handler404 = "webapp.views.page_not_found"
handler500 = "webapp.views.server_error"
