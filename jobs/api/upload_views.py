"""REST views of uploaded scripts."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any, cast

from django.contrib.auth.models import AnonymousUser
from django.http import HttpResponse
from django.utils.http import content_disposition_header
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request
from rest_framework.response import Response

from contracts.archives import MAX_ARCHIVE_BYTES
from contracts.names import UPLOAD_SCHEME
from jobs.api import openapi
from jobs.api.access import SubmitThrottle
from jobs.api.errors import refuse, reject_body
from jobs.api.openapi import operation
from jobs.api.parameters import Parameters
from jobs.api.parsers import FixedMediaType, PartParser, StrictJSONParser
from jobs.api.views import APIView, get_user
from jobs.core.credentials import derive_upload_secret
from jobs.core.errors import NotFoundError
from jobs.core.received_files import MAX_PART_BYTES, PartError
from jobs.core.text import is_storable
from jobs.models import Attempt, Upload
from jobs.planning import uploads
from jobs.planning.schemas import validate_request
from jobs.planning.uploads import (
    FinishUploadRequest,
    UploadConflictError,
    UploadRequest,
    check_upload_request,
    describe_upload,
    serialize_upload,
)

PART = {"application/octet-stream": {"type": "string", "format": "binary", "maxLength": MAX_PART_BYTES}}
PART_OFFSET = OpenApiParameter(
    "offset",
    {"type": "integer", "minimum": 0, "maximum": MAX_ARCHIVE_BYTES},
    required=True,
    description="Byte offset of this part in the file, equal to the number of bytes received so far.",
)
UPLOAD_EXAMPLE = {"name": "nanogpt.tar.gz", "size": 34000}
ARCHIVE_TYPE = "application/octet-stream"
ARCHIVE = {(200, ARCHIVE_TYPE): OpenApiResponse({"type": "string", "format": "binary"}, "The archive.")}


class UploadsView(APIView):
    throttle_classes = [SubmitThrottle]

    @operation("listUploads", openapi.describe_list("UploadBrief"))
    def get(self, request: Request) -> Response:
        """List your uploads, newest first."""
        return Response([serialize_upload(upload) for upload in Upload.objects.filter(owner=get_user(request))])

    @operation(
        "openUpload",
        {
            201: openapi.describe_response("UploadDetail"),
            200: openapi.describe_response("UploadDetail", "Your earlier upload of this file. Send no parts."),
        },
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("UploadRequest"), UPLOAD_EXAMPLE),
    )
    def post(self, request: Request) -> Response:
        """Announce an upload: a .tar.gz or .zip archive, or a single Python file.

        409: you have the maximum number or size of uploads.
        """
        announced = check_upload_request(validate_request(UploadRequest, request.data))
        try:
            upload = uploads.open_upload(get_user(request), announced)
        except UploadConflictError as error:
            return refuse(409, error.field, str(error), "body")
        return Response(describe_upload(upload), status=200 if upload.sha256 else 201)


class UploadView(APIView):
    parser_classes = [PartParser, StrictJSONParser]

    @operation("getUpload", "UploadDetail", 404)
    def get(self, request: Request, key: str) -> Response:
        """Show an upload."""
        return Response(describe_upload(_find_upload(request, key)))

    @operation("sendUploadPart", "UploadedFile", 404, 409, 415, request=PART, parameters=[PART_OFFSET])
    def put(self, request: Request, key: str) -> Response:
        """Send the next bytes of the file, at most 512 KiB.

        409: the offset differs from the number of received bytes, or the upload is complete.
        """
        query = Parameters(request)
        offset = query.read_number(PART_OFFSET.name, None, 0, MAX_ARCHIVE_BYTES)
        query.check()
        upload, data = _find_upload(request, key), cast(Any, request.data)
        if offset is None:
            message = f"`{PART_OFFSET.name}` is missing. Set it to the number of bytes sent so far."
            return refuse(400, PART_OFFSET.name, message, "query")
        try:
            return Response({"size": uploads.append_part(upload, offset, data if isinstance(data, bytes) else b"")})
        except (PartError, UploadConflictError) as error:
            return refuse(409, error.field, str(error))

    @operation("deleteUpload", {204: OpenApiResponse(description="Deleted.")}, 404, 409, 415, 422)
    def delete(self, request: Request, key: str) -> Response:
        """Delete an upload. 409: a job that has not ended needs it."""
        upload = _find_upload(request, key)
        reject_body(request)
        try:
            uploads.delete_if_unused(upload)
        except UploadConflictError as error:
            return refuse(409, error.field, str(error))
        return Response(status=204)


class FinishUploadView(APIView):
    @operation(
        "finishUpload",
        "UploadDetail",
        404,
        409,
        415,
        422,
        request=openapi.request_body(openapi.ref("FinishUploadRequest"), {}),
    )
    def post(self, request: Request, key: str) -> Response:
        """Check the sent file. The response can be your earlier upload of the same content.

        422: the file is incomplete, or the board refused and deleted the archive.
        """
        upload = _find_upload(request, key)
        finish = validate_request(FinishUploadRequest, request.data)
        try:
            return Response(describe_upload(uploads.finish_upload(upload, finish.sha256)))
        except UploadConflictError as error:
            return refuse(409, error.field, str(error))


class UploadArchiveView(APIView):
    content_negotiation_class = FixedMediaType

    @operation("downloadUpload", ARCHIVE, 404)
    def get(self, request: Request, key: str) -> HttpResponse:
        """Download the archive of an upload."""
        upload = _find_upload(request, key)
        suffix = ".tar.gz" if upload.name.endswith(".py") else ""
        answer = _send_archive(upload)
        answer.headers["Content-Disposition"] = _format_disposition(f"{upload.name}{suffix}")
        return answer


class UploadSecretAuthentication(BaseAuthentication):
    """Authenticate `Authorization: Upload SECRET` of the hosts of an attempt, without a user."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, str]:
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        match = request.resolver_match
        assert match is not None, "a view was found"
        expected = derive_upload_secret(match.kwargs["run"], match.kwargs["attempt"])
        if scheme != UPLOAD_SCHEME or not hmac.compare_digest(secret.encode(errors="replace"), expected.encode()):
            raise AuthenticationFailed("The secret of the upload is missing or invalid.")
        return AnonymousUser(), UPLOAD_SCHEME

    def authenticate_header(self, request: Request) -> str:
        return UPLOAD_SCHEME


class AttemptUploadView(APIView):
    authentication_classes = [UploadSecretAuthentication]
    permission_classes = ()
    throttle_classes = ()
    content_negotiation_class = FixedMediaType

    @operation("downloadRunUpload", ARCHIVE, 404)
    def get(self, request: Request, run: str, attempt: int) -> HttpResponse:
        """Download the script of a running attempt. Only its hosts have the secret for this request."""
        running = Attempt.objects.filter(job_id=run, number=attempt, ended=None).select_related("job__upload").first()
        if running is None or running.job.upload is None:
            raise NotFoundError("run", "The attempt has ended, or its upload was deleted.")
        return _send_archive(running.job.upload)


def _send_archive(upload: Upload) -> HttpResponse:
    """Return the archive, which browsers never show as a page. Raises NotFoundError if it is incomplete."""
    path: Path = uploads.get_archive(upload)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError("upload", "The upload is not complete.") from None
    return HttpResponse(content, content_type=ARCHIVE_TYPE)


def _format_disposition(name: str) -> str:
    header = content_disposition_header(as_attachment=True, filename=name)
    assert header is not None, "an attachment has a header"
    return header


def _find_upload(request: Request, key: str) -> Upload:
    """Return an upload of the user, or raise NotFoundError."""
    mine: Any = Upload.objects.filter(owner=get_user(request)).select_related("owner")
    found: Upload | None = mine.filter(pk=key).first() if is_storable(key) else None
    if found is None:
        raise NotFoundError("upload")
    return found
