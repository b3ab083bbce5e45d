"""REST of projects: members, invitations, quota, and what their jobs are handed."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from jobs.api.document import schema
from jobs.api.http.paged import paged, parameters
from jobs.api.http.throttling import SubmitThrottle
from jobs.api.http.views import APIView
from jobs.api.shared import refusals, refuse, refuse_body, user_of
from jobs.core.access import find_project, find_project_to_administer, get_visible_projects
from jobs.core.errors import NotFoundError
from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Role
from jobs.people import invitations, projects, variables
from jobs.people.invitation_mail import get_invitation_url, mail
from jobs.planning.schemas import validate_request

GONE = OpenApiResponse(description="Deleted.")


def _body(name: str, example: object) -> dict[str, object]:
    return schema.request_body({"allOf": [schema.ref(name)]}, example)


class Projects(APIView):
    """Whose jobs share a quota."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="listProjects",
        parameters=parameters(),
        responses={200: schema.list_of("ProjectDetail"), **refusals()},
    )
    def get(self, request: Request) -> Response:
        """`default`, those you are a member of, and all for staff, by name, each with your role. A Link header with
        rel="next" leads to the page after it."""
        page = paged(request, get_visible_projects(request.user), "name")
        return Response(projects.all_told(page.rows, request.user), headers=page.headers)

    @extend_schema(
        operation_id="makeProject",
        request=_body("ProjectRequest", {"name": "vision", "slots": 8}),
        responses={201: schema.of("ProjectDetail"), **refusals(403, 415, 422, 429)},
    )
    def post(self, request: Request) -> Response:
        """A new project, without members. Staff only."""
        user = user_of(request)
        if not (user.is_staff and user.has_perm("jobs.add_project")):
            raise PermissionDenied("Only staff can create projects.")
        made = projects.make(validate_request(projects.ProjectRequest, request.data), user.get_username())
        return Response(projects.told(made, user), status=201)


class ProjectView(APIView):
    """One of them."""

    @extend_schema(operation_id="getProject", responses={200: schema.of("ProjectDetail"), **refusals(404)})
    def get(self, request: Request, project: str) -> Response:
        """With your role."""
        return Response(projects.told(find_project(request.user, project), request.user))

    @extend_schema(
        operation_id="changeProject",
        request=_body("ProjectChange", {"own_slots": 4}),
        responses={200: schema.of("ProjectDetail"), **refusals(403, 404, 415, 422)},
    )
    def patch(self, request: Request, project: str) -> Response:
        """Keep it to fewer slots than staff gave. Its admins only."""
        found, asked = (
            find_project_to_administer(request.user, project),
            validate_request(projects.ProjectChange, request.data),
        )
        projects.keep_to(found, asked.own_slots, user_of(request).get_username())
        found.refresh_from_db()
        return Response(projects.told(found, request.user))


class Members(APIView):
    """Who belongs to it."""

    @extend_schema(
        operation_id="listMembers",
        parameters=parameters(),
        responses={200: schema.list_of("MemberDetail"), **refusals(404)},
    )
    def get(self, request: Request, project: str) -> Response:
        """By name. `default` has none: it is everybody's. A Link header with rel="next" leads to the page after it."""
        page = paged(request, projects.memberships(find_project(request.user, project)), "user__username")
        return Response([projects.member_told(one) for one in page.rows], headers=page.headers)


class MemberView(APIView):
    """One of them."""

    of_path = ("user",)

    @extend_schema(
        operation_id="setRole",
        request=_body("RoleRequest", {"role": "operator"}),
        responses={200: schema.list_of("MemberDetail"), **refusals(403, 404, 415, 422)},
    )
    def put(self, request: Request, project: str, user: str) -> Response:
        """Change a member's role; staff make anybody a member so. Its admins only."""
        found, asked = (
            find_project_to_administer(request.user, project),
            validate_request(projects.RoleRequest, request.data),
        )
        if not is_storable(user):
            raise NotFoundError("member")
        projects.set_role(found, user, Role[asked.role.upper()], user_of(request))
        return Response(projects.members(found))

    @extend_schema(operation_id="removeMember", request=None, responses={204: GONE, **refusals(403, 404, 415, 422)})
    def delete(self, request: Request, project: str, user: str) -> Response:
        """A member belongs to it no more. Its admins, and anybody themselves. 422: nobody would be its admin."""
        by = user_of(request)
        found = find_project(request.user, project)
        if user != by.get_username():
            find_project_to_administer(request.user, project)
        refuse_body(request)
        if not is_storable(user) or not projects.remove_member(found, user, by):
            raise NotFoundError("member")
        return Response(status=204)


class Invitations(APIView):
    """Who may become a member."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="listInvitations", responses={200: schema.list_of("InvitationDetail"), **refusals(403, 404)}
    )
    def get(self, request: Request, project: str) -> Response:
        """Those that may still be accepted. Its admins only."""
        found = find_project_to_administer(request.user, project)
        return Response([invitations.told(one) for one in invitations.still_open(found)])

    @extend_schema(
        operation_id="invite",
        request=_body("InvitationRequest", {"role": "submitter", "days": 7, "note": "Ann"}),
        responses={201: schema.of("NewInvitation"), **refusals(403, 404, 415, 422, 429)},
    )
    def post(self, request: Request, project: str) -> Response:
        """A link that makes whoever follows it a member, once, and an account for whoever has none; it is told this
        once. Its admins only."""
        found = find_project_to_administer(request.user, project)
        asked = validate_request(invitations.InvitationRequest, request.data)
        made, text = invitations.invite(found, asked, user_of(request).get_username())
        answer: invitations.NewInvitation = {
            **invitations.told(made),
            "token": text,
            "url": get_invitation_url(request, text),
            "mailed": mail(made, text),
        }
        return Response(answer, status=201, headers={"Cache-Control": "no-store"})


class InvitationView(APIView):
    """One of them."""

    @extend_schema(operation_id="revokeInvitation", request=None, responses={204: GONE, **refusals(403, 404, 415, 422)})
    def delete(self, request: Request, project: str, key: str) -> Response:
        """Nobody joins with it any more. Its admins only."""
        found, number = find_project_to_administer(request.user, project), parse_whole_number(key, 1, 2**63 - 1)
        refuse_body(request)
        if number is None or not invitations.revoke(found, number, user_of(request).get_username()):
            raise NotFoundError("invitation")
        return Response(status=204)


class Accept(APIView):
    """Join by an invitation."""

    throttle_classes = [SubmitThrottle]

    @extend_schema(
        operation_id="acceptInvitation",
        request=_body("AcceptRequest", {"token": "mbi_..."}),
        responses={200: schema.of("ProjectDetail"), **refusals(403, 409, 415, 422, 429)},
    )
    def post(self, request: Request) -> Response:
        """Become a member of the project that its link was made for. 409 where it was used or revoked, is over, or is
        for another mail address than yours."""
        asked = validate_request(invitations.AcceptRequest, request.data)
        try:
            made = invitations.accept(user_of(request), asked.token)
        except invitations.NotInvitedError as error:
            return refuse(409, "token", str(error))
        return Response(projects.told(made.project, request.user))


class Variables(APIView):
    """What its jobs are handed."""

    @extend_schema(operation_id="listVariables", responses={200: schema.list_of("Variable"), **refusals(403, 404)})
    def get(self, request: Request, project: str) -> Response:
        """Their names, and who set them when; never a value. Its admins only."""
        return Response(variables.known(find_project_to_administer(request.user, project)))


class VariableView(APIView):
    """One of them."""

    of_path = ("variable",)

    @extend_schema(
        operation_id="setVariable",
        request=_body("VariableRequest", {"value": "hf_..."}),
        responses={200: schema.of("Variable"), **refusals(403, 404, 415, 422)},
    )
    def put(self, request: Request, project: str, variable: str) -> Response:
        """Hand it to every job of the project that starts from now on. It is written, never read back. Its admins
        only."""
        found, asked = (
            find_project_to_administer(request.user, project),
            validate_request(variables.VariableRequest, request.data),
        )
        return Response(variables.put(found, variable, asked.value, user_of(request).get_username()))

    @extend_schema(operation_id="removeVariable", request=None, responses={204: GONE, **refusals(403, 404, 415, 422)})
    def delete(self, request: Request, project: str, variable: str) -> Response:
        """Hand it to no job any more. Its admins only."""
        found = find_project_to_administer(request.user, project)
        refuse_body(request)
        if not is_storable(variable) or not variables.remove(found, variable, user_of(request).get_username()):
            raise NotFoundError("variable")
        return Response(status=204)
