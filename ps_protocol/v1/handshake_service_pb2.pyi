from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PARAMETER_SERVER: _ClassVar[Role]
    ROLE_CHIEF: _ClassVar[Role]
    ROLE_RELAY: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PARAMETER_SERVER: Role
ROLE_CHIEF: Role
ROLE_RELAY: Role

class HandshakeRequest(_message.Message):
    __slots__ = ("cluster", "expected_role", "expected_index", "version")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ROLE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INDEX_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    expected_role: Role
    expected_index: int
    version: ProtocolVersion
    def __init__(self, cluster: _Optional[str] = ..., expected_role: _Optional[_Union[Role, str]] = ..., expected_index: _Optional[int] = ..., version: _Optional[_Union[ProtocolVersion, _Mapping]] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("cluster", "role", "index", "process_incarnation")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    role: Role
    index: int
    process_incarnation: int
    def __init__(self, cluster: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., index: _Optional[int] = ..., process_incarnation: _Optional[int] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("identity", "version", "epoch", "warning")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    version: ProtocolVersion
    epoch: int
    warning: str
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., version: _Optional[_Union[ProtocolVersion, _Mapping]] = ..., epoch: _Optional[int] = ..., warning: _Optional[str] = ...) -> None: ...

class TryCheckpointsRequest(_message.Message):
    __slots__ = ("tag", "is_last")
    TAG_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    tag: str
    is_last: bool
    def __init__(self, tag: _Optional[str] = ..., is_last: bool = ...) -> None: ...

class TryCheckpointsResponse(_message.Message):
    __slots__ = ("place", "seen")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    place: str
    seen: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, place: _Optional[str] = ..., seen: _Optional[_Iterable[str]] = ...) -> None: ...

class ProtocolVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...
