import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PostKey(_message.Message):
    __slots__ = ("first", "second", "third", "fourth")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    THIRD_FIELD_NUMBER: _ClassVar[int]
    FOURTH_FIELD_NUMBER: _ClassVar[int]
    first: int
    second: int
    third: int
    fourth: int
    def __init__(self, first: _Optional[int] = ..., second: _Optional[int] = ..., third: _Optional[int] = ..., fourth: _Optional[int] = ...) -> None: ...

class PostOnBoardRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PostHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[PostHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class PostHeader(_message.Message):
    __slots__ = ("board", "author", "incarnation", "key", "keeps_from", "content_bytes")
    BOARD_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FROM_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    board: str
    author: int
    incarnation: int
    key: PostKey
    keeps_from: PostKey
    content_bytes: int
    def __init__(self, board: _Optional[str] = ..., author: _Optional[int] = ..., incarnation: _Optional[int] = ..., key: _Optional[_Union[PostKey, _Mapping]] = ..., keeps_from: _Optional[_Union[PostKey, _Mapping]] = ..., content_bytes: _Optional[int] = ...) -> None: ...

class PostOnBoardResponse(_message.Message):
    __slots__ = ("process_incarnation",)
    PROCESS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    process_incarnation: int
    def __init__(self, process_incarnation: _Optional[int] = ...) -> None: ...

class ReadBoardRequest(_message.Message):
    __slots__ = ("board", "author", "since", "max_wait")
    BOARD_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    board: str
    author: int
    since: PostKey
    max_wait: _duration_pb2.Duration
    def __init__(self, board: _Optional[str] = ..., author: _Optional[int] = ..., since: _Optional[_Union[PostKey, _Mapping]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReadBoardResponse(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: FoundHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[FoundHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class FoundHeader(_message.Message):
    __slots__ = ("process_incarnation", "newest", "key", "incarnation", "content_bytes")
    PROCESS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    process_incarnation: int
    newest: PostKey
    key: PostKey
    incarnation: int
    content_bytes: int
    def __init__(self, process_incarnation: _Optional[int] = ..., newest: _Optional[_Union[PostKey, _Mapping]] = ..., key: _Optional[_Union[PostKey, _Mapping]] = ..., incarnation: _Optional[int] = ..., content_bytes: _Optional[int] = ...) -> None: ...
