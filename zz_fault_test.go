package copilot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// errFault is how an injected fault shows where it is more than the end of the stream.
var errFault = errors.New("fault")

// faultPlan says what goes wrong on a wire. The zero value cuts both directions before the first byte; start from noFault.
type faultPlan struct {
	in     int  // the client can read that many bytes, then readErr; -1: all
	eager  bool // readErr comes together with the last bytes
	split  int  // a read ends at that offset and at each further faultStep bytes; -1: where it likes
	chunk  int  // bytes that one read returns at most; 0: as many as fit
	out    int  // the client can write that many bytes; then the peer is gone, and reads end in readErr; -1: all
	lost   bool // what is written to a peer that is gone seems to succeed, until a read says otherwise
	write  int  // the number of the write that goes wrong, from 0; -1: none
	keep   int  // bytes that this write leaves
	silent bool // it tells a short count and no error; with a negative keep, that it took nothing
	dribs  bool // every write takes one byte

	readErr error
}

const faultStep = 256 // more than most frames have

var noFault = faultPlan{in: -1, split: -1, out: -1, write: -1, readErr: io.EOF}

// faultWire is a byte stream with a scripted server at its other end, which answers within Write. It has no goroutine, and the same calls
// make the same bytes.
type faultWire struct {
	faultPlan

	mu      sync.Mutex
	change  sync.Cond
	request []byte // what the server has not understood yet
	answer  []byte // what the client has not read yet
	sent    int    // bytes to the client
	read    int    // of which it has read
	written int    // bytes from the client
	writes  []int  // their sizes
	turns   int
	gone    bool // the server
	closed  bool

	events map[string][]faultEvent
}

type faultEvent struct {
	id  string
	end int // the offset of the byte after it
}

func newFaultWire(p faultPlan) *faultWire {
	w := &faultWire{faultPlan: p, events: make(map[string][]faultEvent)}
	w.change.L = &w.mu
	return w
}

func (w *faultWire) Read(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		if w.closed {
			return 0, io.ErrClosedPipe
		}
		n := min(len(p), len(w.answer))
		if w.in >= 0 {
			n = min(n, w.in-w.read)
		}
		if w.chunk > 0 {
			n = min(n, w.chunk)
		}
		switch {
		case w.split > w.read:
			n = min(n, w.split-w.read)
		case w.split >= 0:
			n = min(n, faultStep-(w.read-w.split)%faultStep)
		}
		if n > 0 {
			copy(p, w.answer[:n])
			w.answer = w.answer[n:]
			w.read += n
			if w.eager && w.read == w.in {
				return n, w.readErr
			}
			return n, nil
		}
		if w.read == w.in || w.gone && len(w.answer) == 0 {
			return 0, w.readErr
		}
		w.change.Wait()
	}
}

func (w *faultWire) Write(p []byte) (n int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer w.change.Broadcast()
	if w.closed {
		return 0, io.ErrClosedPipe
	}
	n = len(p)
	if w.dribs {
		n = min(n, 1)
	}
	if len(w.writes) == w.write {
		switch {
		case !w.silent:
			n, err = max(n-w.keep, 0), errFault
		case w.keep < 0:
			n = 0
		default:
			n = max(n-w.keep, 1) // frames share a write or not, so that the sizes vary
		}
	}
	if w.out >= 0 && w.written+n >= w.out {
		n = w.out - w.written
		w.gone = true
		if n < len(p) {
			err = errFault
		}
	}
	w.writes = append(w.writes, len(p))
	w.written += n
	w.request = append(w.request, p[:n]...)
	for w.serve() {
	}
	if w.gone && w.lost {
		return len(p), nil
	}
	return n, err
}

func (w *faultWire) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	w.change.Broadcast()
	return nil
}

// serve answers one request, if there is a whole one.
func (w *faultWire) serve() bool {
	r := bytes.NewReader(w.request)
	fr := newFrameReader(r, defaultMaxFrame)
	body, err := fr.next()
	if err != nil {
		return false
	}
	w.request = w.request[len(w.request)-r.Len()-fr.br.Buffered():]
	var m peerMessage
	if json.Unmarshal(body, &m) != nil {
		panic("the client sent what is not JSON")
	}
	id := fmt.Sprint(m.get("sessionId"))
	result := func(v any) { w.send(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": v}) }
	event := func(id, typ string, data any) {
		name := fmt.Sprint("e", w.sent)
		w.send(notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"id": name, "type": typ, "data": data}}))
		w.events[id] = append(w.events[id], faultEvent{name, w.sent})
	}
	switch m.Method {
	case "connect":
		result(map[string]any{"ok": true, "protocolVersion": 3})
	case "session.create":
		event(id, "session.start", map[string]any{"sessionId": id})
		result(map[string]any{"sessionId": id})
	case "session.send":
		w.turns++
		message := fmt.Sprint("m", w.turns)
		result(map[string]any{"messageId": message})
		event(id, "user.message", map[string]any{"messageId": message, "content": "hi"})
		event("b", "session.title_changed", map[string]any{"title": message})
		if w.turns == 1 {
			event(id, "external_tool.requested", map[string]any{"requestId": "r", "toolName": "t", "toolCallId": "c", "arguments": map[string]any{"é": 1}})
			break
		}
		w.send(map[string]any{"jsonrpc": "2.0", "id": "q", "method": "future.question", "params": map[string]any{"sessionId": id}})
		event(id, "assistant.message_delta", map[string]any{"messageId": "a", "deltaContent": "wör"})
	case hdlTool:
		result(map[string]any{"success": true})
		event(id, "external_tool.completed", map[string]any{"requestId": "r"})
		event(id, "assistant.message", map[string]any{"messageId": "a", "content": "dönε"})
		event(id, "session.idle", map[string]any{})
	case "session.abort":
		event(id, "abort", map[string]any{"reason": "user_initiated"})
		event(id, "session.idle", map[string]any{"aborted": true})
		result(map[string]any{"success": true})
	case "ping":
		result(map[string]any{"message": "pong"})
	case "session.destroy":
		result(map[string]any{"success": true})
	}
	return true
}

func (w *faultWire) send(m any) {
	b := encodeFrame(m)
	w.answer = append(w.answer, b...)
	w.sent += len(b)
}

// delivered returns the ids of the session's events that the client could read whole.
func (w *faultWire) delivered(session string) (ids []string) {
	for _, e := range w.events[session] {
		if e.end <= w.read {
			ids = append(ids, e.id)
		}
	}
	return ids
}

// faultTalk has the whole conversation over the wire, goes on after the first failure, and returns what was wrong: an error out of bounds, an event
// too many or too few, a call that did not return. cause is the error that the fault must show as, nil when everything must succeed.
func faultTalk(w *faultWire, cause error) (wrong []string) {
	complain := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	failed := false
	// check takes the outcome of each call before the stop: once one has failed with the cause, all do.
	check := func(what string, err error) {
		switch {
		case err == nil && !failed:
		case err == nil:
			complain("%s succeeded after the failure", what)
		case cause == nil || !errors.Is(err, cause):
			complain("%s: %v", what, err)
		default:
			failed = true
		}
	}
	c, err := NewClient(ctx, w, nil)
	check("NewClient", err)
	if err != nil {
		return wrong
	}
	tool := Tool{Name: "t", Handler: func(context.Context, ToolCall) (ToolResult, error) { return ToolResult{Text: "<x>"}, nil }}
	ids, subs, sessions := []string{"a", "b"}, make([]*Subscription[Event], 2), make([]*Session, 2)
	for i, id := range ids {
		p, err := c.PrepareSession(&SessionConfig{SessionID: id, Tools: []Tool{tool}})
		if err != nil {
			complain("PrepareSession: %v", err)
			return wrong
		}
		subs[i] = p.Subscribe()
		sessions[i], err = p.Start(ctx)
		check("Start", err)
	}
	if a := sessions[0]; a != nil {
		last, err := a.SendAndWait(ctx, Message{Prompt: "tool"})
		check("SendAndWait", err)
		if err == nil && (last == nil || last.Content != "dönε") {
			complain("answered %+v", last)
		}
		ends := 0
		for e, err := range a.Ask(ctx, Message{Prompt: "abort"}) {
			switch {
			case err != nil && !errors.Is(err, ErrAborted):
				check("Ask", err)
				fallthrough
			case err != nil:
				ends++
			case ends > 0:
				complain("Ask yields after its end")
			case e.Type == EventAssistantMessageDelta:
				check("Abort", a.Abort(ctx))
			}
		}
		if ends != 1 {
			complain("Ask ended %d times", ends)
		}
		check("Disconnect", a.Disconnect(ctx))
	}
	_, err = c.Ping(ctx, "")
	check("Ping", err)
	broken := failed
	if err := c.Stop(ctx); err != nil && (cause == nil || broken || !errors.Is(err, ErrNotConfirmed)) {
		complain("Stop: %v", err)
	}
	select {
	case <-c.Done():
	case <-ctx.Done():
		complain("no end")
		return wrong
	}
	end := c.Err()
	if !errors.Is(end, ErrClosed) && (cause == nil || !errors.Is(end, cause)) || broken && errors.Is(end, ErrClosed) {
		complain("ended with %v", end)
	}
	if _, err := c.Ping(ctx, ""); !errors.Is(err, ErrClosed) {
		complain("Ping after Stop: %v", err)
	}

	w.mu.Lock()
	defer w.mu.Unlock()
	for i, id := range ids {
		var got []string
		var ends []error
		for e, err := range subs[i].All(ctx) {
			if err != nil {
				ends = append(ends, err)
			} else {
				got = append(got, e.ID)
			}
		}
		if want := w.delivered(id); !slices.Equal(got, want) {
			complain("events of %s: got %q, want %q", id, got, want)
		}
		clean := sessions[i] != nil && errors.Is(context.Cause(sessions[i].Context()), ErrClosed)
		if clean && len(ends) != 0 || !clean && (len(ends) != 1 || cause == nil || !errors.Is(ends[0], cause)) {
			complain("the sequence of %s ended with %v", id, ends)
		}
		if sessions[i] != nil && context.Cause(sessions[i].Context()) == nil {
			complain("%s has not ended", id)
		}
	}
	return wrong
}

// faultRun has the conversation with one fault and checks that nothing of it is left.
func faultRun(t *testing.T, p faultPlan, cause error, row string) {
	t.Helper()
	before := runtime.NumGoroutine()
	w := newFaultWire(p)
	if wrong := faultTalk(w, cause); wrong != nil {
		t.Errorf("%s: %s", row, strings.Join(wrong, "\n\t"))
	}
	deadline := time.Now().Add(patience)
	for runtime.NumGoroutine() > before {
		if time.Now().After(deadline) {
			t.Fatalf("%s: goroutines are left", row)
		}
		runtime.Gosched()
	}
}

// faultRecord has the conversation without a fault.
func faultRecord(t *testing.T) *faultWire {
	t.Helper()
	w := newFaultWire(noFault)
	if wrong := faultTalk(w, nil); wrong != nil {
		t.Fatal(strings.Join(wrong, "\n"))
	}
	if w.read != w.sent || len(w.events["a"]) < 9 || len(w.events["b"]) < 3 {
		t.Fatalf("read %d of %d bytes, %d and %d events", w.read, w.sent, len(w.events["a"]), len(w.events["b"]))
	}
	return w
}

// TestCutEverywhere has one conversation again and again: handshake, two sessions, a turn with a tool, an aborted turn, a disconnect, a stop. Each
// time the connection is cut after another byte, in the next of several ways.
func TestCutEverywhere(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	stride := 1
	if testing.Short() {
		stride = 7 // no multiple of the number of ways
	}
	toClient := []struct {
		name    string
		readErr error
		eager   bool
		cause   error
	}{
		{"EOF", io.EOF, false, io.ErrUnexpectedEOF},
		{"EOF with data", io.EOF, true, io.ErrUnexpectedEOF},
		{"error", errFault, false, errFault},
	}
	for n := 0; n < whole.sent; n += stride {
		p, way := noFault, toClient[n%len(toClient)]
		p.in, p.readErr, p.eager = n, way.readErr, way.eager
		faultRun(t, p, way.cause, fmt.Sprintf("%s after %d of %d bytes to the client", way.name, n, whole.sent))
	}
	toServer := []struct {
		name    string
		readErr error
		lost    bool
		cause   error
	}{
		{"EOF", io.EOF, false, io.ErrUnexpectedEOF},
		{"error", errFault, false, errFault},
		{"EOF, writes into the void", io.EOF, true, io.ErrUnexpectedEOF},
	}
	for n := 0; n < whole.written; n += stride {
		p, way := noFault, toServer[n%len(toServer)]
		p.out, p.readErr, p.lost = n, way.readErr, way.lost
		faultRun(t, p, way.cause, fmt.Sprintf("%s after %d of %d bytes to the server", way.name, n, whole.written))
	}
}

// TestSplitEverywhere has the same conversation with each read ended at each offset, and with each write taken in parts: that changes nothing.
func TestSplitEverywhere(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	for n := range faultStep {
		p := noFault
		p.split = n
		faultRun(t, p, nil, fmt.Sprintf("reads end after %d bytes and each further %d", n, faultStep))
	}
	for n := 1; n <= 64; n++ {
		p := noFault
		p.chunk = n
		faultRun(t, p, nil, fmt.Sprintf("reads of %d bytes", n))
	}
	p := noFault
	p.dribs = true
	faultRun(t, p, nil, "writes of one byte")
	p.chunk = 1
	faultRun(t, p, nil, "reads and writes of one byte")
	for k, size := range whole.writes {
		for keep := 1; keep < size; keep += 1 + keep/2 {
			p := noFault
			p.write, p.keep, p.silent = k, keep, true
			faultRun(t, p, nil, fmt.Sprintf("write %d lacks %d bytes", k, keep))
		}
	}
}

// TestEveryWriteFails fails each write once, after none, some and all of its bytes, while the server stays.
func TestEveryWriteFails(t *testing.T) {
	leakCheck(t)
	whole := faultRecord(t)
	var rows sync.WaitGroup // all at once: each waits a while for a better reason than its own
	for k, size := range whole.writes {
		for _, keep := range []int{size, size - 1, size / 2, 1, 0} {
			rows.Add(1)
			go func() { // ends with its conversation; awaited below
				defer rows.Done()
				p := noFault
				p.write, p.keep = k, keep
				if wrong := faultTalk(newFaultWire(p), errFault); wrong != nil {
					t.Errorf("write %d fails %d bytes before its end: %s", k, keep, strings.Join(wrong, "\n\t"))
				}
			}()
		}
	}
	rows.Wait()
	for k := range whole.writes { // a writer that makes no progress
		p := noFault
		p.write, p.keep, p.silent = k, -1, true
		rows.Add(1)
		go func() { // as above
			defer rows.Done()
			if wrong := faultTalk(newFaultWire(p), io.ErrShortWrite); wrong != nil {
				t.Errorf("write %d takes nothing: %s", k, strings.Join(wrong, "\n\t"))
			}
		}()
	}
	rows.Wait()
}

// TestDisconnectMeetsTheCut: a session that has lost its route to the end of the connection, but has not been ended by that yet, is not released.
func TestDisconnectMeetsTheCut(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, nil)
	s.mu.Lock() // which its end waits for
	p.conn.Close()
	until(t, "the route's end", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.routes) == 0
	})
	err := s.Disconnect(testContext(t))
	s.mu.Unlock()
	var of *SessionError
	if !errors.Is(err, io.ErrUnexpectedEOF) || !errors.As(err, &of) || of.SessionID != s.ID() {
		t.Errorf("got %v", err)
	}
}

// TestAnyOrder has the server send what does not depend on each other in every order: answers to concurrent calls, events of two sessions, a question.
// Each arrives where it belongs, and no answer before the events that stood before it.
func TestAnyOrder(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	sessions := []*Session{createSession(t, c, &SessionConfig{SessionID: "a"}), createSession(t, c, &SessionConfig{SessionID: "b"})}
	subs := []*Subscription[Event]{sessions[0].Subscribe(), sessions[1].Subscribe()}
	held := make(chan peerMessage, 3)
	p.handle("work", func(_ *peer, m peerMessage) any { held <- m; return noAnswer })

	sent := [2]uint64{} // events so far
	try := func(order []byte) {
		expected := make(map[byte][2]uint64) // what must have been published when an answer is handed over
		var seen sync.Map
		var calls []<-chan error
		for _, name := range []byte("xyz") {
			calls = append(calls, async(func() error {
				raw, err := c.call(testContext(t), "work", map[string]byte{"n": name}, func(json.RawMessage, error) {
					seen.Store(name, [2]uint64{sessions[0].ring.position(), sessions[1].ring.position()})
				})
				if err != nil || string(raw) != fmt.Sprint(name) {
					return fmt.Errorf("%c got %s, %v", name, raw, err)
				}
				return nil
			}))
		}
		requests := make(map[byte]peerMessage)
		for range calls {
			m := await(t, "call", held)
			requests[byte(m.get("n").(float64))] = m
		}
		var out []any
		answer := make(chan peerMessage, 1)
		var events [2][]string
		for _, what := range order {
			switch what {
			case 'q':
				p.mu.Lock()
				p.answers[`"q"`] = answer
				p.mu.Unlock()
				out = append(out, map[string]any{"id": "q", "method": "future.question"})
			case '0', '1':
				n := what - '0'
				sent[n]++
				id := fmt.Sprint("e", sent[n])
				events[n] = append(events[n], id)
				out = append(out, notification("session.event", map[string]any{"sessionId": sessions[n].ID(), "event": map[string]any{"id": id, "type": "x"}}))
			default:
				out = append(out, map[string]any{"id": requests[what].ID, "result": what})
				expected[what] = sent
			}
		}
		p.send(out...)
		for _, call := range calls {
			if err := await(t, "call", call); err != nil {
				t.Errorf("%s: %v", order, err)
			}
		}
		if m := await(t, "answer", answer); m.Error == nil || m.Error.Code != codeMethodNotFound {
			t.Errorf("%s: answered %s", order, m.Result)
		}
		p.sync()
		for name, want := range expected {
			if got, _ := seen.Load(name); got != want {
				t.Errorf("%s: with %c, %v events were there, want %v", order, name, got, want)
			}
		}
		for n, sub := range subs {
			var got []string
			for {
				e, ready, _ := sub.poll()
				if !ready {
					break
				}
				got = append(got, e.ID)
			}
			if !slices.Equal(got, events[n]) {
				t.Errorf("%s: session %d got %q, want %q", order, n, got, events[n])
			}
		}
	}
	n := 0
	var permute func(order, rest []byte)
	permute = func(order, rest []byte) {
		if len(rest) == 0 {
			if n++; !testing.Short() || n%7 == 0 {
				try(order)
			}
			return
		}
		for i, b := range rest {
			if bytes.IndexByte(rest[:i], b) < 0 { // one of two equals
				permute(append(order[:len(order):len(order)], b), slices.Delete(slices.Clone(rest), i, i+1))
			}
		}
	}
	permute(nil, []byte("xyz001q"))
}

// TestDeepNesting: no depth of what either side gives exhausts the stack.
func TestDeepNesting(t *testing.T) {
	leakCheck(t)
	deep := func(n int) string { return strings.Repeat(`{"a":[`, n/2) + strings.Repeat(`]}`, n/2) }
	endless := deep(100_000)
	for _, body := range []string{
		`%s`, `{"a":%s}`, `{"id":%s,"method":"x"}`, `{"id":1,"method":%s}`, `{"id":1,"result":%s}`, `{"id":1,"error":{"data":%s}}`, `{"method":"x","params":%s}`,
		`{"method":"session.event","params":{"sessionId":%s}}`, `{"method":"session.event","params":{"sessionId":"s","event":%s}}`,
		`{"method":"session.event","params":{"sessionId":"s","event":{"type":"session.idle","data":%s}}}`,
	} {
		for _, text := range []string{endless, endless[:len(endless)/2], strings.Repeat("[", 1_000_000)} {
			c, p := newPeer(t, nil)
			createSession(t, c, &SessionConfig{SessionID: "s"})
			p.raw([]byte(spineFrame(fmt.Sprintf(body, text))))
			await(t, "client's end", c.Done())
			var broken *FrameError
			if err := c.Err(); !errors.As(err, &broken) {
				t.Errorf("%s: ended with %v", body, err)
			}
		}
	}

	var e Event
	if err := e.UnmarshalJSON([]byte(`{"type":"x","data":` + endless + `}`)); err == nil {
		t.Error("an event was decoded")
	}
	e = Event{Type: EventAssistantMessage, Data: json.RawMessage(endless)}
	if p, ok := e.Payload().(*RawPayload); !ok || p.Err == nil {
		t.Errorf("payload is %T", e.Payload())
	}

	raw := json.RawMessage(endless)
	c, p := newPeer(t, &Options{Handlers: map[string]HandlerFunc{"deep": func(context.Context, string, json.RawMessage) (any, error) { return raw, nil }}})
	if _, err := c.PrepareSession(&SessionConfig{Tools: []Tool{{Name: "t", Parameters: raw}}}); !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("a tool's schema: %v", err)
	}
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	sub := s.Subscribe()
	for name, err := range map[string]error{
		"Client.Call": c.Call(testContext(t), "x", raw, nil), "Session.Call": s.Call(testContext(t), "x", raw, nil),
		"inside": c.Call(testContext(t), "x", map[string]any{"a": raw}, nil),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if m := p.request("deep", nil); m.Error == nil {
		t.Error("a handler's result was sent")
	}
	p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"assistant.message","data":` + deep(maxNesting-10) + `}}}`)))
	if e := next(t, sub); len(e.Data) == 0 {
		t.Error("what is within the limit was lost")
	}
}

// TestRepeatedMembers: of members that stand twice the last counts, as a whole. Nothing is put together from both.
func TestRepeatedMembers(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	subs := make(map[string]*Subscription[Event])
	for _, id := range []string{"a", "b"} {
		subs[id] = createSession(t, c, &SessionConfig{SessionID: id}).Subscribe()
	}
	const x, y = `"event":{"type":"x","data":1}`, `"event":{"type":"y"}`
	for _, tt := range []struct{ members, want string }{
		{`"params":{"sessionId":"a","sessionId":"b",` + x + `}`, "b x 1"},
		{`"params":{"sessionId":"a",` + x + `,"session\u0049d":"b"}`, "b x 1"},
		{`"params":{"sessionId":"a",` + x + `,"sessionId":null}`, ""},
		{`"params":{"sessionId":"a",` + x + `,"sessionId":["b"]}`, ""},
		{`"params":{"sessionId":"a",` + x + `,` + y + `}`, "a y "},
		{`"params":{"sessionId":"a",` + x + `,"event":null}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":{"sessionId":"b"}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":{` + x + `}`, ""},
		{`"params":{"sessionId":"a",` + x + `},"params":[]`, ""},
		{`"params":{"sessionId":"a",` + x + `},"param\u0073":{"sessionId":"b",` + y + `}`, "b y "},
		{`"params":{"sessionId":"a",` + x + `},"method":"x"`, ""},
		{`"params":{"sessionId":"a","event":{"type":"x","type":"y","data":1,"data":{"n":2}}}`, `a y {"n":2}`},
	} {
		p.raw([]byte(spineFrame(`{"method":"session.event",` + tt.members + `}`)))
		p.sync()
		got := ""
		for id, sub := range subs {
			if e, ready, _ := sub.poll(); ready {
				got += fmt.Sprintf("%s %s %s", id, e.Type, e.Data)
			}
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.members, got, tt.want)
		}
	}
	answer := make(chan peerMessage, 1)
	p.mu.Lock()
	p.answers[`"second"`] = answer
	p.mu.Unlock()
	p.raw([]byte(spineFrame(`{"id":"first","id":"second","method":"future.method"}`)))
	await(t, "answer", answer)
}

// TestOddTexts has the server use texts that are no UTF-8, or no Unicode, wherever it can name or say something: nothing is lost or taken for
// something else, and what names a request comes back as it was spelled.
func TestOddTexts(t *testing.T) {
	leakCheck(t)
	odd := []string{`"\ud800"`, `"\ud801"`, `"\udc00\ud800"`, "\"\xff\"", "\"\xfe\"", "\"\xed\xa0\x80\"", `"\ufffd"`, `"\u0000"`, "\"\u2028<&>\"", `"\"\\\/"`}
	calls := make(chan ToolCall, len(odd))
	exchanges := make(chan struct{}, len(odd))
	c, p := newPeer(t, &Options{ModelTransport: roundTripper(func(*http.Request) (*http.Response, error) {
		exchanges <- struct{}{}
		return nil, errors.New("no model")
	})})
	s := createSession(t, c, &SessionConfig{SessionID: "s", OnPermission: ApproveAll, Tools: []Tool{{Name: "t", Handler: func(_ context.Context, call ToolCall) (ToolResult, error) {
		calls <- call
		return ToolResult{}, nil
	}}}})
	sub := s.Subscribe()
	expectSpelling := func(method string, n int) {
		t.Helper()
		p.wait(method, n)
		var got []string
		for _, m := range p.calls(method) {
			got = append(got, string(member(m.Params, "requestId")))
		}
		want := slices.Clone(odd[:n])
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s answers %q, want %q", method, got, want)
		}
	}
	event := func(typ, data string) {
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":` + typ + `,"id":` + typ + `,"agentId":` + typ + `,"data":` + data + `}}}`)))
	}
	for _, text := range odd {
		event(text, `{"a":`+text+`}`)
		if e := next(t, sub); string(e.Data) != `{"a":`+text+`}` || e.Type != EventType(unquote([]byte(text))) {
			t.Errorf("%s: came as %q with %s", text, e.Type, e.Data)
		}
		for range 2 { // the second is a repetition
			p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"external_tool.requested","data":{"requestId":` + text + `,"toolName":"t","toolCallId":"c","arguments":{"a":` + text + `}}}}}`)))
			next(t, sub)
		}
		if call := await(t, "tool for "+text, calls); string(call.Arguments) != `{"a":`+text+`}` {
			t.Errorf("%s: called with %s", text, call.Arguments)
		}
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"permission.requested","data":{"requestId":` + text + `,"permissionRequest":{"kind":"shell","fullCommandText":` + text + `}}}}}`)))
		next(t, sub)
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":"s","event":{"type":"external_tool.requested","data":{"requestId":"r","toolName":` + text + `,"toolCallId":` + text + `}}}}`)))
		next(t, sub)
		p.raw([]byte(spineFrame(`{"method":"session.event","params":{"sessionId":` + text + `,"event":{"type":"x"}}}`))) // of nobody

		answer := make(chan peerMessage, 1)
		p.mu.Lock()
		p.answers[text] = answer
		p.mu.Unlock()
		p.raw([]byte(spineFrame(`{"id":` + text + `,"method":` + text + `,"params":{"sessionId":` + text + `}}`)))
		await(t, "answer to "+text, answer)

		p.handle("refuse", func(_ *peer, m peerMessage) any {
			p.raw([]byte(spineFrame(`{"id":` + string(m.ID) + `,"error":{"code":7,"message":` + text + `,"data":` + text + `}}`)))
			return noAnswer
		})
		var refused *RPCError
		if err := c.Call(testContext(t), "refuse", nil, nil); !errors.As(err, &refused) || refused.Code != 7 || string(refused.Data) != text || refused.Error() == "" {
			t.Errorf("%s: refused with %v", text, err)
		}

		p.raw([]byte(spineFrame(`{"id":"m","method":"llmInference.httpRequestStart","params":{"requestId":` + text + `,"method":"GET","url":"http://m.invalid/","headers":{}}}`)))
		p.raw([]byte(spineFrame(`{"id":"m","method":"llmInference.httpRequestChunk","params":{"requestId":` + text + `,"data":"","end":true}}`)))
		await(t, "exchange "+text, exchanges)
	}
	expectSpelling(hdlTool, len(odd))
	expectSpelling(hdlPermission, len(odd))
	expectSpelling("llmInference.httpResponseStart", len(odd))
	if _, ready, err := sub.poll(); ready || err != nil {
		t.Errorf("one event too many, %v", err)
	}
}

// TestTokensStayWithTheCLI: what a launched CLI gets in its environment is not put into the host's, where every other child would find it.
func TestTokensStayWithTheCLI(t *testing.T) {
	leakCheck(t)
	before := os.Environ()
	o := spineOptions(t, spineScript{TCP: true})
	o.GitHubToken, o.ConnectionToken, o.BaseDir = "ghs_fault", "conn_fault", t.TempDir()
	c := spineStart(t, o)
	if cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", c.PID())); err == nil && bytes.Contains(cmdline, []byte("_fault")) {
		t.Errorf("the child's arguments are %q", cmdline)
	}
	if after := os.Environ(); !slices.Equal(before, after) {
		t.Error("the host's environment has changed")
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if after := os.Environ(); !slices.Equal(before, after) {
		t.Error("the host's environment has changed")
	}
}

// TestDirFSModes: the server decides who may read a file, but nothing beyond that: no set-user-id bit, whatever number it sends.
func TestDirFSModes(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no modes here")
	}
	leakCheck(t)
	dir := t.TempDir()
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: DirFS(dir)})
	for i, mode := range []uint32{0o600, 0o7600, 1<<23 | 1<<31 | 0o600} { // the last two as the system and as package fs spell such bits
		p.request("sessionFs.writeFile", map[string]any{"sessionId": "s", "path": fmt.Sprint("/f", i), "content": "x", "mode": mode})
		p.request("sessionFs.mkdir", map[string]any{"sessionId": "s", "path": fmt.Sprint("/d", i), "mode": mode | 0o100})
		for name, want := range map[string]os.FileMode{fmt.Sprint("f", i): 0o600, fmt.Sprint("d", i): os.ModeDir | 0o700} {
			if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode() != want {
				t.Errorf("mode %o of %s: got %v, %v", mode, name, info, err)
			}
		}
	}
}

// TestTinyFrames: frames that say nothing cost nothing that stays, however many come.
func TestTinyFrames(t *testing.T) {
	leakCheck(t)
	_, p := newPeer(t, &Options{Logger: slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	held := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	goroutines, heap := runtime.NumGoroutine(), held()
	const n = 1 << 15
	for _, body := range []string{`{}`, `7`, `{"method":"x"}`, `{"id":1,"result":0}`, `{"method":"session.event","params":{"sessionId":"none","event":{}}}`} {
		p.raw(bytes.Repeat([]byte(spineFrame(body)), n))
	}
	p.sync()
	if now := runtime.NumGoroutine(); now > goroutines+1 { // the log's
		t.Errorf("%d goroutines were %d", now, goroutines)
	}
	if now := held(); now > heap+4<<20 {
		t.Errorf("%d bytes are held, there were %d", now, heap)
	}
}
