package copilot

// This file is the wire: Content-Length frames, JSON-RPC 2.0 messages, and the connection that carries them.
//
// Its one idea: a frame is read once into a buffer of its own, walked once by a scanner that finds what routing needs,
// and handed on as slices of that buffer; nothing is decoded before somebody asks. A connection has one reader, which
// never waits for anybody, and one writer, which owns the write end. Nothing here knows what a session means.

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/bits"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"
)

const (
	defaultMaxFrame = 256 << 20
	maxHeaderBlock  = 16 << 10        // bytes of header before the blank line
	eagerBody       = 1<<20 + 128<<10 // body bytes reserved on the header's word; more is reserved only as it arrives
	maxQuote        = 256             // bytes of the peer's input that an error quotes
	maxNesting      = 10000           // as encoding/json
	writeBatch      = 64 << 10        // waiting frames are written together up to this many bytes
	maxReplies      = 1024            // answers of the reader that may wait for the writer
	maxReplyBytes   = 4 << 20
	settle          = time.Second // how long the end of one half of a connection waits for the other half's better reason
)

// Error codes of JSON-RPC 2.0, and the one of cancelled requests.
const (
	codeInvalidRequest = -32600
	codeMethodNotFound = -32601
	codeInvalidParams  = -32602
	codeInternal       = -32603
	codeCancelled      = -32800
)

// FrameError reports that the peer broke the framing: a bad header, a frame over the limit, or a body that is not JSON.
// The connection ends with it, since nobody can tell where the next frame begins. errors.Is finds [ErrFrameTooLarge] in it
// where that is the reason.
type FrameError struct {
	Reason string // what is wrong
	Quote  string // the offending input as it came, at most 256 bytes
	Size   int64  // declared body size in bytes, when it was the fault
	Err    error  // ErrFrameTooLarge or nil
}

// Error gives the reason and quotes the input.
func (e *FrameError) Error() string {
	s := "copilot: broken frame: " + e.Reason
	if e.Quote != "" {
		s += ": " + strconv.Quote(e.Quote)
	}
	return s
}

// Unwrap returns the cause.
func (e *FrameError) Unwrap() error { return e.Err }

func quoted(b []byte) string { return string(b[:min(len(b), maxQuote)]) }

// quote is s in Go's quotes, for an error text, cut to what such a text may hold.
func quote(s string) string {
	if len(s) > maxQuote {
		s = s[:maxQuote]
	}
	return strconv.Quote(s)
}

// clip cuts a text that others made to what an error may quote.
func clip(s string) string {
	if len(s) <= maxQuote {
		return s
	}
	return strings.ToValidUTF8(s[:maxQuote], "") + "..."
}

// clipped is an error of encoding/json or time with its text cut: it may quote the peer at length.
type clipped struct{ err error }

func (e clipped) Error() string { return clip(e.err.Error()) }
func (e clipped) Unwrap() error { return e.err }

// mask replaces every secret in s.
func mask(s string, secrets []string) string {
	// Longest first: one secret may be part of another.
	for _, secret := range slices.SortedFunc(slices.Values(secrets), func(a, b string) int { return cmp.Compare(len(b), len(a)) }) {
		if secret != "" {
			s = strings.ReplaceAll(s, secret, "[redacted]")
		}
	}
	return s
}

// frameReader reads Content-Length frames. Header names match in any case and may be surrounded by blanks, lines may end
// in CRLF or LF, and other headers are ignored.
type frameReader struct {
	br  *bufio.Reader
	max int
}

func newFrameReader(r io.Reader, max int) *frameReader {
	return &frameReader{br: bufio.NewReaderSize(r, 2*maxHeaderBlock), max: max}
}

// next returns the next body in a buffer that belongs to the caller. It returns io.EOF only between frames.
func (r *frameReader) next() ([]byte, error) {
	length, read := int64(-1), 0
	for {
		line, err := r.line(read)
		if err != nil {
			return nil, err
		}
		read += len(line)
		text := bytes.TrimRight(line, "\r\n")
		if len(text) == 0 {
			if read == len(line) {
				return nil, &FrameError{Reason: "blank line where a header should be"}
			}
			break
		}
		name, value, ok := bytes.Cut(text, []byte{':'})
		if !ok {
			return nil, &FrameError{Reason: "not a header line", Quote: quoted(line)}
		}
		if !bytes.EqualFold(bytes.TrimSpace(name), []byte("Content-Length")) {
			continue
		}
		if length >= 0 {
			return nil, &FrameError{Reason: "second Content-Length", Quote: quoted(line)}
		}
		if length = parseLength(bytes.TrimSpace(value)); length < 0 {
			return nil, &FrameError{Reason: "Content-Length is not a decimal number", Quote: quoted(line)}
		}
	}
	switch {
	case length < 0:
		return nil, &FrameError{Reason: "no Content-Length"}
	case length > int64(r.max):
		return nil, &FrameError{Reason: fmt.Sprintf("body of %d bytes, the limit is %d", length, r.max), Size: length, Err: ErrFrameTooLarge}
	}
	return r.body(int(length))
}

// line returns the next header line, valid until the next read. It refuses what cannot become one without waiting for a
// line end that may never come.
func (r *frameReader) line(before int) ([]byte, error) {
	for checked := 0; ; {
		buf, _ := r.br.Peek(r.br.Buffered())
		if i := bytes.IndexByte(buf, '\n'); i >= 0 {
			buf = buf[:i+1]
		}
		for ; checked < len(buf); checked++ {
			if c := buf[checked]; c < ' ' && c != '\t' && c != '\r' && c != '\n' {
				return nil, &FrameError{Reason: "control character in a header", Quote: quoted(buf)}
			}
		}
		if before+len(buf) > maxHeaderBlock {
			return nil, &FrameError{Reason: fmt.Sprintf("header of more than %d bytes", maxHeaderBlock), Quote: quoted(buf)}
		}
		if len(buf) > 0 && buf[len(buf)-1] == '\n' {
			_, err := r.br.Discard(len(buf))
			return buf, err
		}
		if _, err := r.br.Peek(len(buf) + 1); err != nil {
			if err == io.EOF && before+len(buf) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
}

func parseLength(b []byte) int64 {
	for _, c := range b {
		if c < '0' || c > '9' {
			return -1
		}
	}
	n, err := strconv.ParseInt(string(b), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

func (r *frameReader) body(n int) ([]byte, error) {
	buf := make([]byte, min(n, eagerBody))
	for filled := 0; ; {
		k, err := io.ReadFull(r.br, buf[filled:])
		filled += k
		if err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
		if filled == n {
			return buf, nil
		}
		grown := make([]byte, min(n, 2*filled))
		copy(grown, buf)
		buf = grown
	}
}

// message is one JSON-RPC message taken apart but not decoded: each member is the raw JSON as received, a slice of the
// frame, nil when absent. The members of a session event are found on the same walk.
type message struct {
	id, method, params, result, err []byte

	sessionID []byte // params.sessionId
	event     []byte // params.event
	fields    eventFields
}

// eventFields are the members of params.event, raw.
type eventFields struct {
	id, typ, timestamp, parentID, agentID, ephemeral, data []byte
}

// parse walks the body once. It reports false when the body is not JSON; JSON of another shape leaves fields nil.
// Of members that stand twice the last counts.
func (m *message) parse(body []byte) bool {
	*m = message{}
	s := scanner{b: body}
	if s.peek() != '{' {
		return s.skip(0) && s.peek() == 0 && s.i == len(body)
	}
	for more := s.open(); more; more = s.more() {
		key, ok := s.key()
		if !ok {
			return false
		}
		if string(key) == "params" {
			if m.params, ok = m.parseParams(&s); !ok {
				return false
			}
			continue
		}
		raw, ok := s.value(1)
		if !ok {
			return false
		}
		switch string(key) {
		case "id":
			m.id = raw
		case "method":
			m.method = raw
		case "result":
			m.result = raw
		case "error":
			m.err = raw
		}
	}
	return s.closed && s.peek() == 0 && s.i == len(body)
}

func (m *message) parseParams(s *scanner) ([]byte, bool) {
	m.sessionID, m.event, m.fields = nil, nil, eventFields{}
	if s.peek() != '{' {
		return s.value(1)
	}
	start := s.i
	for more := s.open(); more; more = s.more() {
		key, ok := s.key()
		if !ok {
			return nil, false
		}
		if string(key) == "event" {
			if m.event, ok = m.fields.parse(s); !ok {
				return nil, false
			}
			continue
		}
		raw, ok := s.value(2)
		if !ok {
			return nil, false
		}
		if string(key) == "sessionId" {
			m.sessionID = raw
		}
	}
	return s.b[start:s.i:s.i], s.closed
}

func (f *eventFields) parse(s *scanner) ([]byte, bool) {
	*f = eventFields{}
	if s.peek() != '{' {
		return s.value(2)
	}
	start := s.i
	for more := s.open(); more; more = s.more() {
		key, ok := s.key()
		if !ok {
			return nil, false
		}
		raw, ok := s.value(3)
		if !ok {
			return nil, false
		}
		switch string(key) {
		case "id":
			f.id = raw
		case "type":
			f.typ = raw
		case "timestamp":
			f.timestamp = raw
		case "parentId":
			f.parentID = raw
		case "agentId":
			f.agentID = raw
		case "ephemeral":
			f.ephemeral = raw
		case "data":
			f.data = raw
		}
	}
	return s.b[start:s.i:s.i], s.closed
}

// eachMember calls f with the name and the raw value of each member of a JSON object, and not at all when obj is none. obj must be valid JSON.
func eachMember(obj []byte, f func(name, raw []byte)) {
	s := scanner{b: obj}
	if s.peek() != '{' {
		return
	}
	for more := s.open(); more; more = s.more() {
		name, ok := s.key()
		if !ok {
			return
		}
		raw, ok := s.value(1)
		if !ok {
			return
		}
		f(name, raw)
	}
}

// member returns the raw value of one member of a JSON object, nil when obj is no object or has none of that name; the last one where it
// stands twice. obj must be valid JSON.
func member(obj []byte, name string) (raw []byte) {
	eachMember(obj, func(k, v []byte) {
		if string(k) == name {
			raw = v
		}
	})
	return raw
}

// scanner walks JSON text and accepts what encoding/json accepts, without building anything.
type scanner struct {
	b      []byte
	i      int
	closed bool // the object that more was asked about ended with its brace
}

// peek skips white space and returns the next byte, 0 at the end.
func (s *scanner) peek() byte {
	for s.i < len(s.b) {
		switch c := s.b[s.i]; c {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return c
		}
	}
	return 0
}

// open enters the object at the cursor and reports whether it has a member.
func (s *scanner) open() bool {
	s.i++
	s.closed = s.peek() == '}'
	if s.closed {
		s.i++
	}
	return !s.closed
}

// more steps past what stands between two members. When it reports false, closed tells a brace from broken text.
func (s *scanner) more() bool {
	switch s.peek() {
	case ',':
		s.i++
		return true
	case '}':
		s.i++
		s.closed = true
	default:
		s.closed = false
	}
	return false
}

// key reads a member's name and its colon. Escapes in the name are resolved.
func (s *scanner) key() ([]byte, bool) {
	if s.peek() != '"' {
		return nil, false
	}
	start := s.i
	if !s.text() {
		return nil, false
	}
	key := s.b[start+1 : s.i-1]
	if bytes.IndexByte(key, '\\') >= 0 {
		key = []byte(unquote(s.b[start:s.i]))
	}
	if s.peek() != ':' {
		return nil, false
	}
	s.i++
	return key, true
}

func (s *scanner) value(depth int) ([]byte, bool) {
	s.peek()
	start := s.i
	ok := s.skip(depth)
	return s.b[start:s.i:s.i], ok
}

// skip steps over one value.
func (s *scanner) skip(depth int) bool {
	switch c := s.peek(); c {
	case '"':
		return s.text()
	case '{', '[':
		end := c + 2 // in ASCII, for both
		if depth >= maxNesting {
			return false
		}
		s.i++
		if s.peek() == end {
			s.i++
			return true
		}
		for {
			if c == '{' {
				if s.peek() != '"' || !s.text() || s.peek() != ':' {
					return false
				}
				s.i++
			}
			if !s.skip(depth + 1) {
				return false
			}
			switch s.peek() {
			case ',':
				s.i++
			case end:
				s.i++
				return true
			default:
				return false
			}
		}
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	default:
		return s.number()
	}
}

func (s *scanner) literal(word string) bool {
	if len(s.b)-s.i < len(word) || string(s.b[s.i:s.i+len(word)]) != word {
		return false
	}
	s.i += len(word)
	return true
}

func (s *scanner) number() bool {
	at := func() byte {
		if s.i < len(s.b) {
			return s.b[s.i]
		}
		return 0
	}
	digits := func() bool {
		start := s.i
		for c := at(); '0' <= c && c <= '9'; c = at() {
			s.i++
		}
		return s.i > start
	}
	if at() == '-' {
		s.i++
	}
	if at() == '0' {
		s.i++
	} else if !digits() {
		return false
	}
	if at() == '.' {
		s.i++
		if !digits() {
			return false
		}
	}
	if c := at(); c == 'e' || c == 'E' {
		s.i++
		if c := at(); c == '+' || c == '-' {
			s.i++
		}
		return digits()
	}
	return true
}

// text steps over the string at the cursor, eight bytes at a time where nothing special stands in them.
func (s *scanner) text() bool {
	b, i := s.b, s.i+1
	for {
		for i+8 <= len(b) {
			special := specialBytes(binary.LittleEndian.Uint64(b[i:]))
			if special != 0 {
				i += bits.TrailingZeros64(special) / 8
				break
			}
			i += 8
		}
		if i >= len(b) {
			return false
		}
		switch c := b[i]; {
		case c == '"':
			s.i = i + 1
			return true
		case c == '\\':
			if i+1 >= len(b) {
				return false
			}
			switch b[i+1] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i += 2
			case 'u':
				if i+6 > len(b) || !isHex(b[i+2]) || !isHex(b[i+3]) || !isHex(b[i+4]) || !isHex(b[i+5]) {
					return false
				}
				i += 6
			default:
				return false
			}
		case c < ' ':
			return false
		default:
			i++
		}
	}
}

// specialBytes marks, in the high bit of each byte, the quotes, backslashes and control characters of w. The lowest mark is
// exact; higher ones may be the carry of a lower one.
func specialBytes(w uint64) uint64 {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	quote, slash := w^(ones*'"'), w^(ones*'\\')
	return ((quote-ones)&^quote | (slash-ones)&^slash | (w-ones*' ')&^w) & highs
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

// unquote returns the text of a raw JSON string, "" when raw is absent or no string. Lone surrogates and invalid UTF-8
// become U+FFFD, as in encoding/json.
func unquote(raw []byte) string {
	if len(raw) < 2 || raw[0] != '"' {
		return ""
	}
	if text := raw[1 : len(raw)-1]; bytes.IndexByte(text, '\\') < 0 && utf8.Valid(text) {
		return string(text)
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// exactText is unquote for what names something: names that a Go string of UTF-8 cannot hold stay apart, as raw JSON.
func exactText(raw []byte) string {
	text := unquote(raw)
	if strings.ContainsRune(text, utf8.RuneError) {
		return string(raw)
	}
	return text
}

// framePool recycles the buffers that outgoing frames are built in.
var framePool = sync.Pool{New: func() any { return new(bytes.Buffer) }}

const headerRoom = len("Content-Length: ") + 20 + len("\r\n\r\n")

// frame is one finished outgoing frame.
type frame struct {
	buf  *bytes.Buffer
	from int // where the header begins
}

func (f frame) bytes() []byte { return f.buf.Bytes()[f.from:] }

func (f frame) free() {
	if f.buf.Cap() <= writeBatch {
		f.buf.Reset()
		framePool.Put(f.buf)
	}
}

// newFrame begins a frame: what is written to buf next is its body.
func newFrame() frame {
	f := frame{buf: framePool.Get().(*bytes.Buffer), from: headerRoom}
	f.buf.Write(make([]byte, headerRoom))
	return f
}

func (f frame) text(s string) { f.buf.WriteString(s) }

// finish closes the message's object and puts the header before it.
func (f frame) finish() frame {
	f.buf.WriteByte('}')
	var room [headerRoom]byte
	header := append(room[:0], "Content-Length: "...)
	header = strconv.AppendInt(header, int64(f.buf.Len()-headerRoom), 10)
	header = append(header, "\r\n\r\n"...)
	f.from = headerRoom - len(header)
	copy(f.buf.Bytes()[f.from:], header)
	return f
}

// jsonWriter is a value that knows how to append itself.
type jsonWriter interface {
	writeJSON(buf *bytes.Buffer) error
}

// encodeJSON appends v. Raw JSON is copied as it is, once it has been found to be JSON. Characters that only HTML needs escaped stay as they are.
func encodeJSON(buf *bytes.Buffer, v any) error {
	switch v := v.(type) {
	case jsonWriter:
		return v.writeJSON(buf)
	case string:
		if plain(v) {
			buf.Write(appendQuoted(buf.AvailableBuffer(), v))
			return nil
		}
	case json.RawMessage:
		if len(v) == 0 {
			break
		}
		s := scanner{b: v}
		if !s.skip(0) || s.peek() != 0 || s.i != len(v) {
			return errors.New("raw JSON is not valid")
		}
		buf.Write(v)
		return nil
	}
	enc := json.NewEncoder(buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	buf.Truncate(buf.Len() - 1) // Encode's line end
	return nil
}

// marshal is encodeJSON into a slice of its own.
func marshal(v any) (json.RawMessage, error) {
	var buf bytes.Buffer
	if err := encodeJSON(&buf, v); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

// conn is a JSON-RPC connection over any byte stream. All its methods may be called from any goroutine.
type conn struct {
	rwc io.ReadWriteCloser
	log *slog.Logger // for the reader and what runs on it, see aside
	max int

	// handle gets each request (id != nil) and notification, in wire order, on the reader: it must not block.
	handle func(m *message)
	// explain may replace the reason for an end by a better one, such as the exit of the process behind it.
	explain func(error) error
	// ended runs once, after every frame that was read has been handled, on whichever goroutine ended the connection.
	ended func(error)

	wake      chan struct{} // tells the idle writer that something waits
	done      chan struct{} // closed by fail, after err is set
	readDone  chan struct{} // closed when the reader has returned
	writeDone chan struct{} // closed when the writer has returned

	lastID     atomic.Uint64
	mu         sync.Mutex
	err        error
	pending    map[uint64]*call
	waiting    []*outgoing // what the writer has yet to take, in order
	idle       bool        // the writer waits for wake
	replies    int         // how many of waiting are answers given by the reader
	replyBytes int         // and how long they are together
}

// outgoing is a frame on its way to the writer. What the writer has taken will be written whole, what it has not taken can be withdrawn.
type outgoing struct {
	frame frame
	taken chan struct{} // closed when the writer has it; nil when nobody waits for that
	reply bool          // an answer given by the reader
}

// call is a request that waits for its response.
type call struct {
	method string
	// then, when not nil, runs once with what became of the request, on the goroutine that knows: on the reader, before the next frame is
	// read, when a response came. It runs even when ctx has ended the wait meanwhile, so that an answer which comes too late can be undone. It
	// must not block.
	then  func(result json.RawMessage, err error)
	until <-chan struct{} // when not nil, ends the wait like ctx does

	id      uint64
	request outgoing
	done    chan struct{}
	result  json.RawMessage
	err     error
}

func newConn(rwc io.ReadWriteCloser, max int, log *slog.Logger) *conn {
	return &conn{
		rwc: rwc, max: max, log: slog.New(&aside{next: log.Handler()}),
		explain:  func(err error) error { return err },
		wake:     make(chan struct{}, 1),
		done:     make(chan struct{}),
		readDone: make(chan struct{}), writeDone: make(chan struct{}),
		pending: make(map[uint64]*call),
	}
}

// start runs the connection. The fields above must not change afterwards.
func (c *conn) start() {
	go c.readLoop()  // owned by the connection; ends with the stream, at the latest when close closes it
	go c.writeLoop() // owned by the connection; ends with done or its first error
}

func (c *conn) readLoop() {
	err := c.read()
	close(c.readDone)
	if err == io.EOF { // between frames: still too early for us, who did not close
		err = io.ErrUnexpectedEOF
	}
	c.fail(c.explain(err))
}

func (c *conn) read() error {
	r := newFrameReader(c.rwc, c.max)
	var m message
	for {
		body, err := r.next()
		if err != nil {
			return err
		}
		if !m.parse(body) {
			return &FrameError{Reason: "body is not JSON", Quote: quoted(body)}
		}
		switch {
		case m.method != nil:
			c.handle(&m)
		case m.id != nil && (m.result != nil || m.err != nil):
			c.respond(&m)
		default:
			c.log.Debug("copilot: dropped a message that is no request, response or notification")
		}
	}
}

// respond completes the call that a response belongs to. The server's own ids live in another space and never get here.
func (c *conn) respond(m *message) {
	id, err := strconv.ParseUint(string(m.id), 10, 64)
	c.mu.Lock()
	cl := c.pending[id]
	if err == nil {
		delete(c.pending, id)
	}
	c.mu.Unlock()
	if err != nil || cl == nil {
		c.log.Debug("copilot: dropped a response that no call waits for")
		return
	}
	if m.err != nil && string(m.err) != "null" {
		cl.finish(nil, newRPCError(cl.method, m.err))
	} else {
		cl.finish(m.result, nil)
	}
}

func (cl *call) finish(result json.RawMessage, err error) {
	cl.result, cl.err = result, err
	if cl.then != nil {
		cl.then(result, err)
	}
	close(cl.done)
}

func newRPCError(method string, raw []byte) *RPCError {
	e := &RPCError{Method: method, Code: codeInternal, Message: unquote(member(raw, "message"))}
	if code, err := strconv.Atoi(string(member(raw, "code"))); err == nil {
		e.Code = code
	}
	if data := member(raw, "data"); data != nil {
		e.Data = bytes.Clone(data)
	}
	return e
}

func (c *conn) writeLoop() {
	err := c.write()
	close(c.writeDone)
	if err == nil {
		return
	}
	// The reader may still hold the peer's last frames, and has the better reason where the peer is gone altogether.
	timer := time.NewTimer(settle)
	defer timer.Stop()
	select {
	case <-c.readDone:
	case <-timer.C:
		c.fail(fmt.Errorf("copilot: write: %w", err))
	}
}

func (c *conn) write() error {
	var frames []frame
	var batch []byte
	for !isClosed(c.done) {
		if frames = c.take(frames[:0]); len(frames) == 0 {
			select {
			case <-c.wake:
				runtime.Gosched() // whoever is about to send, as after a burst of answers, gets into the same write
			case <-c.done:
			}
			continue
		}
		data := frames[0].bytes()
		if len(frames) > 1 {
			batch = batch[:0]
			for _, f := range frames {
				batch = append(batch, f.bytes()...)
			}
			data = batch
		}
		for len(data) > 0 {
			n, err := c.rwc.Write(data)
			if err == nil && n == 0 {
				err = io.ErrShortWrite
			}
			if err != nil {
				return err
			}
			data = data[n:]
		}
		for i, f := range frames {
			f.free()
			frames[i] = frame{}
		}
		if cap(batch) > 2*writeBatch {
			batch = nil
		}
	}
	return nil
}

// take moves the frames that wait, as many as go into one write, to the writer. When there are none it asks for a wake-up.
func (c *conn) take(frames []frame) []frame {
	c.mu.Lock()
	defer c.mu.Unlock()
	for size := 0; size < writeBatch && len(frames) < len(c.waiting); {
		o := c.waiting[len(frames)]
		n := len(o.frame.bytes())
		size += n
		if o.reply {
			c.replies--
			c.replyBytes -= n
		}
		if o.taken != nil {
			close(o.taken)
		}
		frames = append(frames, o.frame)
		o.frame = frame{} // a call may wait long for its answer
	}
	c.waiting = slices.Delete(c.waiting, 0, len(frames))
	c.idle = len(frames) == 0
	return frames
}

// queueLocked makes o wait for the writer. c.mu is held.
func (c *conn) queueLocked(o *outgoing) {
	c.waiting = append(c.waiting, o)
	if c.idle {
		c.idle = false
		c.wake <- struct{}{} // has room: the writer has taken the signal before, or there was none
	}
}

// withdraw takes o back and reports whether that was still possible.
func (c *conn) withdraw(o *outgoing) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.waiting, o)
	if i < 0 {
		return false
	}
	c.waiting = slices.Delete(c.waiting, i, i+1)
	o.frame.free()
	return true
}

// call sends a request and waits for its response as long as ctx lasts and cl.until is not closed. A ctx that is done already sends nothing.
func (c *conn) call(ctx context.Context, cl *call, params any) (json.RawMessage, error) {
	if err := c.request(ctx, cl, params); err != nil {
		return nil, err
	}
	select {
	case <-cl.done:
		return cl.result, cl.err
	case <-ctx.Done():
	case <-cl.until:
	}
	if isClosed(cl.done) {
		return cl.result, cl.err
	}
	err := ErrClosed
	if ctx.Err() != nil {
		err = contextError(ctx)
	}
	switch {
	case c.withdraw(&cl.request):
		if c.forget(cl.id) { // else the end of the connection has finished it
			cl.finish(nil, err)
		}
	case cl.then == nil:
		c.forget(cl.id)
	}
	return nil, err
}

// request registers the call and queues its frame. On an error the call is over.
func (c *conn) request(ctx context.Context, cl *call, params any) error {
	cl.id, cl.done = c.lastID.Add(1), make(chan struct{})
	f := newFrame()
	f.text(`{"jsonrpc":"2.0","id":`)
	f.buf.Write(strconv.AppendUint(f.buf.AvailableBuffer(), cl.id, 10))
	f.text(`,"method":`)
	f.buf.Write(appendQuoted(f.buf.AvailableBuffer(), cl.method))
	f.text(`,"params":`)
	if params == nil {
		f.text("{}")
	} else if err := encodeJSON(f.buf, params); err != nil {
		f.free()
		err = fmt.Errorf("%w: params of %s: %w", ErrInvalidConfig, cl.method, err)
		cl.finish(nil, err)
		return err
	}
	cl.request.frame = f.finish()
	var err error
	if ctx.Err() != nil {
		err = contextError(ctx)
	}
	c.mu.Lock()
	if err == nil {
		err = c.err
	}
	if err == nil {
		c.pending[cl.id] = cl
		c.queueLocked(&cl.request)
	}
	c.mu.Unlock()
	if err != nil {
		cl.request.frame.free()
		cl.finish(nil, err)
	}
	return err
}

func appendQuoted(b []byte, s string) []byte {
	if !plain(s) {
		q, _ := marshal(s) // a string always marshals
		return append(b, q...)
	}
	return append(append(append(b, '"'), s...), '"')
}

// plain reports whether s is ASCII text that needs no escapes in JSON.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// forget drops a pending call and reports whether it was there.
func (c *conn) forget(id uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.pending[id]
	delete(c.pending, id)
	return ok
}

// answer builds the response to the request with this raw id: err when it is not nil, else result.
func (c *conn) answer(id []byte, result any, err *RPCError) frame {
	if err == nil {
		f, encErr := answerFrame(id, `,"result":`, result)
		if encErr == nil {
			return f
		}
		err = &RPCError{Code: codeInternal, Message: "the result cannot be encoded"}
	}
	object := struct {
		Code    int             `json:"code"`
		Message string          `json:"message"`
		Data    json.RawMessage `json:"data,omitempty"`
	}{err.Code, err.Message, err.Data}
	f, encErr := answerFrame(id, `,"error":`, object)
	if encErr != nil { // Data of a handler's making
		object.Data = nil
		f, _ = answerFrame(id, `,"error":`, object)
	}
	return f
}

func answerFrame(id []byte, name string, v any) (frame, error) {
	f := newFrame()
	f.text(`{"jsonrpc":"2.0","id":`)
	f.buf.Write(id)
	f.text(name)
	if err := encodeJSON(f.buf, v); err != nil {
		f.free()
		return frame{}, err
	}
	return f.finish(), nil
}

// reply answers a request from a handler's goroutine; it waits for the writer as long as the connection lives.
func (c *conn) reply(id []byte, result any, err *RPCError) error {
	o := &outgoing{frame: c.answer(id, result, err), taken: make(chan struct{})}
	c.mu.Lock()
	failure := c.err
	if failure == nil {
		c.queueLocked(o)
	}
	c.mu.Unlock()
	if failure != nil {
		o.frame.free()
		return failure
	}
	return c.written(o)
}

// written returns when the writer has taken o, or with the reason why the connection has ended before.
func (c *conn) written(o *outgoing) error {
	select {
	case <-o.taken:
		return nil
	case <-c.done:
		return c.failure()
	}
}

// replyNow answers a request from the reader, which must not wait: a peer that asks without ever reading the answers ends the
// connection.
func (c *conn) replyNow(id []byte, result any, err *RPCError) {
	o := &outgoing{frame: c.answer(id, result, err), reply: true}
	c.mu.Lock()
	c.replies++
	c.replyBytes += len(o.frame.bytes())
	full := c.replies > maxReplies || c.replyBytes > maxReplyBytes
	if !full {
		c.queueLocked(o)
	}
	c.mu.Unlock()
	if full {
		c.fail(errors.New("copilot: the peer sends requests without reading the answers"))
	}
}

// fail ends the connection: the first reason sticks, every pending call gets it, later calls too. It does not close the stream.
func (c *conn) fail(err error) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = err
	pending := c.pending
	c.pending = nil
	c.mu.Unlock()
	c.ended(err)
	close(c.done)
	for _, cl := range pending {
		cl.finish(nil, err)
	}
}

func (c *conn) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// aside is a log that the reader may write to: the host's handler behind it may be slow, or call the client. It gets the records in order, on
// a goroutine that exists only while there are some. Those that find too many waiting are counted instead.
type aside struct {
	next slog.Handler

	mu      sync.Mutex
	waiting []slog.Record
	lost    int
	running bool
}

const maxAside = 256 // records that wait

// Enabled leaves that question to run, since only the host's handler knows.
func (a *aside) Enabled(context.Context, slog.Level) bool { return true }

// WithAttrs and WithGroup complete a slog.Handler; nobody calls them.
func (a *aside) WithAttrs([]slog.Attr) slog.Handler { return a }
func (a *aside) WithGroup(string) slog.Handler      { return a }

func (a *aside) Handle(_ context.Context, r slog.Record) error {
	if _, off := a.next.(discardHandler); off {
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.waiting) == maxAside {
		a.lost++
		return nil
	}
	a.waiting = append(a.waiting, r.Clone())
	if !a.running {
		a.running = true
		go a.run() // owned by the connection; ends when nothing waits, which is up to the host's handler
	}
	return nil
}

func (a *aside) run() {
	for {
		a.mu.Lock()
		records, lost := a.waiting, a.lost
		a.waiting, a.lost = nil, 0
		a.running = len(records) > 0
		a.mu.Unlock()
		if len(records) == 0 {
			return
		}
		if lost > 0 {
			r := slog.NewRecord(time.Now(), slog.LevelDebug, "copilot: the log was too slow for all records", 0)
			r.AddAttrs(slog.Int("lost", lost))
			records = append(records, r)
		}
		for _, r := range records {
			if a.next.Enabled(context.Background(), r.Level) {
				_ = a.next.Handle(context.Background(), r)
			}
		}
	}
}

// discardHandler is slog.DiscardHandler, which is younger than go.mod's Go.
type discardHandler struct{}

func (discardHandler) Enabled(context.Context, slog.Level) bool  { return false }
func (discardHandler) Handle(context.Context, slog.Record) error { return nil }
func (d discardHandler) WithAttrs([]slog.Attr) slog.Handler      { return d }
func (d discardHandler) WithGroup(string) slog.Handler           { return d }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// contextError is ctx.Err() that also matches the context's cause.
func contextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if cause == nil || cause == err {
		return err
	}
	return &nestedError{err, cause}
}

// nestedError is two errors, both to be found, in a text that names the package once.
type nestedError struct{ outer, inner error }

func (e *nestedError) Error() string {
	return e.outer.Error() + ": " + strings.TrimPrefix(e.inner.Error(), "copilot: ")
}

func (e *nestedError) Unwrap() []error { return []error{e.outer, e.inner} }
