"""REST views of projects, members, invitations, variables, quotas, and REST tokens."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from drf_spectacular.utils import OpenApiResponse
from knox.models import AuthToken
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api import openapi
from jobs.api.access import SubmitThrottle
from jobs.api.errors import reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import describe_page_parameters, get_page
from jobs.api.views import APIView, get_user
from jobs.core.access import find_project, find_project_to_administer, get_visible_projects
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Role
from jobs.people import invitations, projects, tokens, variables
from jobs.people.invitations import get_invitation_url, mail_invitation
from jobs.planning.schemas import validate_request

GONE = OpenApiResponse(description="Deleted.")


def _body(name: str, example: object) -> dict[str, object]:
    return openapi.request_body({"allOf": [openapi.ref(name)]}, example)


class ProjectsView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("listProjects", openapi.describe_list("ProjectDetail"), parameters=describe_page_parameters())
    def get(self, request: Request) -> Response:
        """List the project `default` and your projects by name, each with your role. Staff see all projects.

        A Link header with rel="next" leads to the next page.
        """
        page = get_page(request, get_visible_projects(request.user), "name")
        return Response(projects.serialize_projects(page.rows, request.user), headers=page.headers)

    @operation(
        "makeProject",
        {201: openapi.describe_response("ProjectDetail")},
        415,
        422,
        request=_body("ProjectRequest", {"name": "vision", "slots": 8}),
    )
    def post(self, request: Request) -> Response:
        """Create a project without members. Staff only."""
        user = get_user(request)
        if not (user.is_staff and user.has_perm("jobs.add_project")):
            raise PermissionDenied("Only staff can create projects.")
        made = projects.create_project(validate_request(projects.ProjectRequest, request.data), user.get_username())
        return Response(projects.serialize_project(made, user), status=201)


class ProjectView(APIView):
    @operation("getProject", "ProjectDetail", 404)
    def get(self, request: Request, project: str) -> Response:
        """Show a project with your role."""
        return Response(projects.serialize_project(find_project(request.user, project), request.user))

    @operation("changeProject", "ProjectDetail", 404, 415, 422, request=_body("ProjectChange", {"own_slots": 4}))
    def patch(self, request: Request, project: str) -> Response:
        """Limit a project to fewer slots than staff allow. Project admins only."""
        found, body = (
            find_project_to_administer(request.user, project),
            validate_request(projects.ProjectChange, request.data),
        )
        projects.set_own_slots(found, body.own_slots, get_user(request).get_username())
        found.refresh_from_db()
        return Response(projects.serialize_project(found, request.user))


class MembersView(APIView):
    @operation("listMembers", openapi.describe_list("MemberDetail"), 404, parameters=describe_page_parameters())
    def get(self, request: Request, project: str) -> Response:
        """List the members of a project by name. The project `default` has no members, because it includes all users.

        A Link header with rel="next" leads to the next page.
        """
        page = get_page(request, projects.get_memberships(find_project(request.user, project)), "user__username")
        return Response([projects.serialize_member(one) for one in page.rows], headers=page.headers)


class MemberView(APIView):
    path_fields = ("user",)

    @operation(
        "setRole",
        openapi.describe_list("MemberDetail"),
        404,
        415,
        422,
        request=_body("RoleRequest", {"role": "operator"}),
    )
    def put(self, request: Request, project: str, user: str) -> Response:
        """Change the role of a member. Staff can add any user this way. Project admins only."""
        found, body = (
            find_project_to_administer(request.user, project),
            validate_request(projects.RoleRequest, request.data),
        )
        if not is_storable(user):
            raise NotFoundError("member")
        projects.set_role(found, user, Role[body.role.upper()], get_user(request))
        return Response(projects.serialize_members(found))

    @operation("removeMember", {204: GONE}, 404, 415, 422)
    def delete(self, request: Request, project: str, user: str) -> Response:
        """Remove a member. Project admins can remove any member, and a member can leave.

        422: the project would have no admin.
        """
        by = get_user(request)
        found = find_project(request.user, project)
        if user != by.get_username():
            find_project_to_administer(request.user, project)
        reject_body(request)
        if not is_storable(user) or not projects.remove_member(found, user, by):
            raise NotFoundError("member")
        return Response(status=204)


class InvitationsView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("listInvitations", openapi.describe_list("InvitationDetail"), 404)
    def get(self, request: Request, project: str) -> Response:
        """List the invitations that can still be accepted. Project admins only."""
        found = find_project_to_administer(request.user, project)
        return Response([invitations.serialize_invitation(one) for one in invitations.get_open_invitations(found)])

    @operation(
        "invite",
        {201: openapi.describe_response("NewInvitation")},
        404,
        415,
        422,
        request=_body("InvitationRequest", {"role": "submitter", "days": 7, "note": "Ann"}),
    )
    def post(self, request: Request, project: str) -> Response:
        """Create a link that adds one member to the project, and creates an account if necessary.

        The response is the only one with the link. Project admins only.
        """
        found = find_project_to_administer(request.user, project)
        body = validate_request(invitations.InvitationRequest, request.data)
        made, text = invitations.create_invitation(found, body, get_user(request).get_username())
        answer: invitations.NewInvitation = {
            **invitations.serialize_invitation(made),
            "token": text,
            "url": get_invitation_url(request, text),
            "mailed": mail_invitation(made, text),
        }
        return Response(answer, status=201, headers={"Cache-Control": "no-store"})


class InvitationView(APIView):
    @operation("revokeInvitation", {204: GONE}, 404, 415, 422)
    def delete(self, request: Request, project: str, key: str) -> Response:
        """Revoke an invitation. Project admins only."""
        found, number = find_project_to_administer(request.user, project), parse_whole_number(key, 1, 2**63 - 1)
        reject_body(request)
        if number is None or not invitations.revoke_invitation(found, number, get_user(request).get_username()):
            raise NotFoundError("invitation")
        return Response(status=204)


class AcceptInvitationView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("acceptInvitation", "ProjectDetail", 409, 415, 422, request=_body("AcceptRequest", {"token": "mbi_..."}))
    def post(self, request: Request) -> Response:
        """Accept an invitation and become a member of its project.

        409: the invitation was used or revoked, has expired, or is for another email address.
        """
        body = validate_request(invitations.AcceptRequest, request.data)
        made = invitations.accept_invitation(get_user(request), body.token)
        return Response(projects.serialize_project(made.project, request.user))


class VariablesView(APIView):
    @operation("listVariables", openapi.describe_list("Variable"), 404)
    def get(self, request: Request, project: str) -> Response:
        """List the variables of a project without values. Project admins only."""
        return Response(variables.serialize_variables(find_project_to_administer(request.user, project)))


class VariableView(APIView):
    path_fields = ("variable",)

    @operation("setVariable", "Variable", 404, 415, 422, request=_body("VariableRequest", {"value": "hf_..."}))
    def put(self, request: Request, project: str, variable: str) -> Response:
        """Set a variable for jobs that start from now on. Its value cannot be read. Project admins only."""
        found, body = (
            find_project_to_administer(request.user, project),
            validate_request(variables.VariableRequest, request.data),
        )
        return Response(variables.set_variable(found, variable, body.value, get_user(request).get_username()))

    @operation("removeVariable", {204: GONE}, 404, 415, 422)
    def delete(self, request: Request, project: str, variable: str) -> Response:
        """Remove a variable from jobs that start from now on. Project admins only."""
        found = find_project_to_administer(request.user, project)
        reject_body(request)
        if not is_storable(variable) or not variables.remove_variable(
            found, variable, get_user(request).get_username()
        ):
            raise NotFoundError("variable")
        return Response(status=204)


TOKEN_EXAMPLE = openapi.request_body(
    {"allOf": [openapi.ref("ApiTokenRequest")]}, {"name": "ci", "scopes": ["read", "submit"]}
)


class TokensView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("listTokens", openapi.describe_list("ApiToken"), parameters=describe_page_parameters())
    def get(self, request: Request) -> Response:
        """List your valid REST tokens, newest first.

        A Link header with rel="next" leads to the next page.
        """
        page = get_page(request, tokens.get_active_tokens(get_user(request)), "-created", "-token_key")
        return Response([tokens.serialize_token(token) for token in page.rows], headers=page.headers)

    @operation("makeToken", {201: openapi.describe_response("NewApiToken")}, 415, 422, request=TOKEN_EXAMPLE)
    def post(self, request: Request) -> Response:
        """Create a REST token. The response is the only one with the token.

        A request with a token cannot get more scopes or a later expiry than that token. `shortened` explains why the
        token expires earlier than requested.
        """
        body = validate_request(tokens.ApiTokenRequest, request.data)
        by = request.auth if isinstance(request.auth, AuthToken) else None
        token, text, shortened = tokens.create_token(get_user(request), body, by=by)
        made: tokens.NewApiToken = {**tokens.serialize_token(token), "token": text, "shortened": shortened}
        return Response(made, status=201, headers={"Cache-Control": "no-store"})


class TokenView(APIView):
    @operation("revokeToken", {204: OpenApiResponse(description="The token is revoked.")}, 404, 415, 422)
    def delete(self, request: Request, key: str) -> Response:
        """Revoke one of your tokens."""
        reject_body(request)
        if not is_storable(key) or not tokens.revoke_token(get_user(request), key):
            raise NotFoundError("token", "no such token, or it belongs to another user")
        return Response(status=204)
