package copilot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"
)

// serveWatch makes the peer accept watches under the given id, with these messages in the same write as the answer.
func serveWatch(p *peer, id string, replay func() []any) {
	p.handle("sessions.watch", func(p *peer, m peerMessage) any {
		all := []any{map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": map[string]any{
			"sessionId": id, "readOnly": true, "metadata": map[string]any{"sessionId": id, "kind": "remote-session"}}}}
		if replay != nil {
			all = append(all, replay()...)
		}
		p.send(all...)
		return noAnswer
	})
}

func disconnected(id string) map[string]any {
	return notification("session.lifecycle", map[string]any{"type": "session.disconnected", "sessionId": id})
}

// watch begins a watch that must succeed.
func watch(t testing.TB, c *Client, id string, opts *WatchOptions) *SharedSessionWatch {
	t.Helper()
	w, err := c.WatchSharedSession(testContext(t), id, opts)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// collect ranges a watch to its end and returns the events' types, the lag reported, and the last error.
func collect(t testing.TB, w *SharedSessionWatch) (events []Event, skipped uint64, last error) {
	t.Helper()
	for e, err := range w.Events(testContext(t)) {
		var lag *LagError
		switch {
		case errors.As(err, &lag):
			skipped += lag.Skipped
		case err != nil:
			last = err
		default:
			events = append(events, e)
		}
	}
	return events, skipped, last
}

// expectClosed compares the ids of all sessions.close so far, and checks that nothing was destroyed.
func expectClosed(t testing.TB, c *Client, p *peer, want ...string) {
	t.Helper()
	if got := released(t, c, p, "sessions.close"); !slices.Equal(got, want) {
		t.Errorf("closed %q, want %q", got, want)
	}
	for _, method := range []string{"session.destroy", "session.delete"} {
		if n := len(p.calls(method)); n != 0 {
			t.Errorf("%d of %s", n, method)
		}
	}
}

func TestWatchRequestAndMetadata(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("sessions.watch", func(p *peer, m peerMessage) any {
		return json.RawMessage(`{"sessionId":"assigned","readOnly":true,"later":1,"metadata":{"sessionId":"assigned","kind":"coding-agent","name":"N","summary":"S",
			"startTime":"2026-01-02T03:04:05.678Z","modifiedTime":"2026-01-02T04:04:05Z","repository":{"owner":"o","name":"n","branch":"b"},
			"pullRequestNumber":7,"resourceId":"r","staleAt":"never","state":"running","unknown":[]}}`)
	})
	w := watch(t, c, "wanted", nil)
	if m := p.wait("sessions.watch", 1); string(m.Params) != `{"sessionId":"wanted"}` {
		t.Errorf("params %s", m.Params)
	}
	want := RemoteSessionMetadata{
		SessionID: "assigned", Kind: "coding-agent", Name: "N", Summary: "S",
		StartTime: time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC), ModifiedTime: time.Date(2026, 1, 2, 4, 4, 5, 0, time.UTC),
		Repository: RemoteRepository{"o", "n", "b"}, PullRequestNumber: 7, ResourceID: "r", StaleAt: "never", State: "running",
	}
	if got := w.Metadata(); got != want {
		t.Errorf("got %+v", got)
	}
	if w.SessionID() != "assigned" || !w.ReadOnly() {
		t.Errorf("%q %v", w.SessionID(), w.ReadOnly())
	}
	expectRoutes(t, c, "assigned")
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "assigned")
	expectRoutes(t, c)
}

// TestWatchHasNoWayToAct lists what a watch can do. Comparable metadata holds nothing that is shared.
func TestWatchHasNoWayToAct(t *testing.T) {
	typ := reflect.TypeFor[*SharedSessionWatch]()
	var got []string
	for i := 0; i < typ.NumMethod(); i++ {
		got = append(got, typ.Method(i).Name)
	}
	if want := []string{"Close", "Events", "Metadata", "ReadOnly", "SessionID"}; !slices.Equal(got, want) {
		t.Errorf("methods %q, want %q", got, want)
	}
	for i := 0; i < typ.Elem().NumField(); i++ {
		if f := typ.Elem().Field(i); f.IsExported() || f.Anonymous {
			t.Errorf("field %s can be reached", f.Name)
		}
	}
	var plain func(typ reflect.Type)
	plain = func(typ reflect.Type) {
		for i := 0; i < typ.NumField(); i++ {
			switch f := typ.Field(i); {
			case f.Type == reflect.TypeFor[time.Time]():
			case f.Type.Kind() == reflect.Struct:
				plain(f.Type)
			case f.Type.Kind() != reflect.String && f.Type.Kind() != reflect.Int:
				t.Errorf("metadata field %s is a %s", f.Name, f.Type)
			}
		}
	}
	plain(reflect.TypeFor[RemoteSessionMetadata]())
}

// TestCase007WatchIsPassive replays in the same write as the answer, asks for answers, then goes on live.
func TestCase007WatchIsPassive(t *testing.T) {
	leakCheck(t)
	answered := func(ctx context.Context, method string, params json.RawMessage) (any, error) {
		t.Errorf("%s was handled", method)
		return nil, nil
	}
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "mine", Handlers: map[string]HandlerFunc{"canvas.open": answered}})
	const id = "theirs"
	serveWatch(p, id, func() (all []any) {
		all = append(all, p.event("requested", "of nobody", nil))
		for i := 0; i < 10; i++ {
			all = append(all, p.event(id, "replayed", i))
		}
		for i, typ := range []string{"permission.requested", "external_tool.requested", "elicitation.requested", "user_input.requested", "command.execute", "mcp.oauth_required"} {
			all = append(all, p.event(id, typ, map[string]any{"requestId": fmt.Sprint("r", i), "toolName": "t", "toolCallId": "c"}))
		}
		return all
	})
	w := watch(t, c, "requested", nil)
	for _, method := range []string{"canvas.open", "userInput.request", "hooks.invoke"} {
		if m := p.request(method, map[string]any{"sessionId": id}); m.Error == nil {
			t.Errorf("%s was answered with %s", method, m.Result)
		}
	}
	p.send(p.event(id, "live", 10), p.event(id, "live", 11), disconnected(id))
	events, skipped, last := collect(t, w)
	if len(events) != 18 || skipped != 0 || last != ErrDisconnected {
		t.Fatalf("%d events, %d skipped, %v", len(events), skipped, last)
	}
	for i, e := range append(slices.Clone(events[:10]), events[16:]...) {
		if string(e.Data) != fmt.Sprint(i) {
			t.Errorf("event %d is %s", i, e.Data)
		}
	}
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	var got []string
	for _, m := range p.calls("") {
		got = append(got, m.Method)
	}
	if want := []string{"connect", "session.create", "sessions.watch", "session.destroy"}; !slices.Equal(got, want) {
		t.Errorf("requests %q, want %q", got, want)
	}
}

// TestCase076WatchLeavesRequestsPending checks it for a client that would answer in a session of its own.
func TestCase076WatchLeavesRequestsPending(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "mine", OnPermission: func(context.Context, PermissionRequest) (PermissionDecision, error) {
		t.Error("asked")
		return PermissionDecision{}, nil
	}})
	serveWatch(p, "theirs", nil)
	w := watch(t, c, "theirs", nil)
	p.send(p.event("theirs", "permission.requested", map[string]any{"requestId": "r", "permissionRequest": map[string]any{"kind": "shell"}}), disconnected("theirs"))
	if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected {
		t.Errorf("%d events, %v", len(events), last)
	}
	p.sync()
	if n := len(p.calls("")); n != 3 {
		t.Errorf("%d requests", n)
	}
}

// TestCase006TwoClients has one client drive a session and another watch it.
func TestCase006TwoClients(t *testing.T) {
	leakCheck(t)
	a, pa := newPeer(t, nil)
	b, pb := newPeer(t, nil)
	s := createSession(t, a, &SessionConfig{SessionID: "s"})
	driver := s.Subscribe()
	serveWatch(pb, "s", nil)
	w := watch(t, b, "s", nil)
	var watcher []Event
	for i := 0; i < 20; i++ {
		e := pa.event("s", "n", i, "ephemeral", i%2 == 0)
		pa.send(e)
		pb.send(e)
	}
	for e, err := range w.Events(testContext(t)) {
		if err != nil {
			t.Fatal(err)
		}
		if watcher = append(watcher, e); len(watcher) == 20 {
			break
		}
	}
	for i, want := range watcher {
		if got := next(t, driver); !reflect.DeepEqual(got, want) {
			t.Errorf("%d: driver %+v, watcher %+v", i, got, want)
		}
	}
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, b, pb, "s")
	if _, err := s.Send(testContext(t), Message{Prompt: "x"}); err != nil {
		t.Errorf("the driver: %v", err)
	}
}

// TestWatchReplay reads a long replay late, with rings that are large enough, the default, and small.
func TestWatchReplay(t *testing.T) {
	const n = 10000
	for _, test := range []struct{ buffer, size int }{{n, n}, {0, 8192}, {100, 100}} {
		leakCheck(t)
		c, p := newPeer(t, nil)
		serveWatch(p, "w", func() (all []any) {
			for i := 0; i < n; i++ {
				all = append(all, p.event("w", "n", i))
			}
			return all
		})
		w := watch(t, c, "w", &WatchOptions{EventBuffer: test.buffer})
		p.sync()
		i, skipped := 0, uint64(0)
		for e, err := range w.Events(testContext(t)) {
			var lag *LagError
			if errors.As(err, &lag) {
				if i != 0 {
					t.Errorf("gap after %d", i)
				}
				skipped += lag.Skipped
				i += int(lag.Skipped)
				continue
			}
			if err != nil || string(e.Data) != fmt.Sprint(i) {
				t.Fatalf("%d: %s %v", i, e.Data, err)
			}
			if i++; i == n {
				break
			}
		}
		if want := uint64(n - test.size); skipped != want {
			t.Errorf("buffer %d: skipped %d, want %d", test.buffer, skipped, want)
		}
		p.send(p.event("w", "live", nil), disconnected("w"))
		if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected { // a later range goes on
			t.Errorf("%d events, %v", len(events), last)
		}
	}
}

func TestWatchRefusedAnswers(t *testing.T) {
	var refusal *RPCError
	var decoding *json.UnmarshalTypeError
	is := func(want error) func(error) bool { return func(err error) bool { return errors.Is(err, want) } }
	for _, test := range []struct {
		name   string
		answer string
		check  func(error) bool
		closed []string
	}{
		{"not read-only", `{"sessionId":"w","readOnly":false,"metadata":{}}`, is(errNotReadOnly), []string{"w"}},
		{"nothing said", `{"sessionId":"w","metadata":{}}`, is(errNotReadOnly), []string{"w"}},
		{"a string", `{"sessionId":"w","readOnly":"true"}`, is(errNotReadOnly), []string{"w"}},
		{"other case", `{"sessionId":"w","READONLY":true}`, is(errNotReadOnly), []string{"w"}},
		{"metadata", `{"sessionId":"w","readOnly":true,"metadata":{"name":5}}`, func(err error) bool { return errors.As(err, &decoding) }, []string{"w"}},
		{"no id", `{"readOnly":true}`, func(err error) bool { return err != nil }, nil},
		{"no object", `5`, func(err error) bool { return err != nil }, nil},
		{"null", `null`, func(err error) bool { return err != nil }, nil},
		{"open here", `{"sessionId":"open","readOnly":true}`, is(ErrSessionOpen), nil},
		{"watched here", `{"sessionId":"watched","readOnly":true}`, is(ErrSessionOpen), nil},
		{"unknown method", "-32601", func(err error) bool { return errors.As(err, &refusal) && errors.Is(err, ErrNotSupported) }, nil},
		{"not found", "-32603", func(err error) bool { return errors.As(err, &refusal) && errors.Is(err, ErrSessionNotFound) }, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			leakCheck(t)
			c, p := newPeer(t, nil)
			sub := createSession(t, c, &SessionConfig{SessionID: "open"}).Subscribe()
			serveWatch(p, "watched", nil)
			watch(t, c, "watched", nil)
			p.handle("sessions.watch", func(p *peer, m peerMessage) any {
				if test.answer[0] == '-' {
					var code int
					_ = json.Unmarshal([]byte(test.answer), &code)
					return &peerError{Code: code, Message: "Session not found, or Unhandled method"}
				}
				return json.RawMessage(test.answer)
			})
			w, err := c.WatchSharedSession(testContext(t), "asked", nil)
			var s *SessionError
			if w != nil || !test.check(err) || !errors.As(err, &s) || s.SessionID != "asked" {
				t.Errorf("got %v", err)
			}
			expectClosed(t, c, p, test.closed...)
			expectRoutes(t, c, "open", "watched")
			p.emit("open", "x", nil)
			next(t, sub)
		})
	}
	c, p := newPeer(t, nil)
	for _, err := range []error{
		second(c.WatchSharedSession(testContext(t), "", nil)),
		second(c.WatchSharedSession(testContext(t), "w", &WatchOptions{EventBuffer: -1})),
	} {
		if !errors.Is(err, ErrInvalidConfig) {
			t.Errorf("got %v", err)
		}
	}
	if n := len(p.calls("")); n != 1 {
		t.Errorf("%d requests", n)
	}
}

// TestWatchOfTheRealCLI shows what today's CLI makes of a watch.
func TestWatchOfTheRealCLI(t *testing.T) {
	c := startReal(t, Options{})
	if _, err := c.WatchSharedSession(testContext(t), "some-session", nil); !errors.Is(err, ErrNotSupported) {
		t.Errorf("got %v", err)
	}
	expectRoutes(t, c)
}

func TestWatchClose(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	noMore := func(what string, w *SharedSessionWatch, want error) {
		t.Helper()
		if events, _, last := collect(t, w); len(events) != 1 || last != want {
			t.Errorf("%s: %d events, then %v", what, len(events), last)
		}
		if err := w.Close(testContext(t)); err != nil {
			t.Errorf("%s: close again: %v", what, err)
		}
		expectRoutes(t, c)
	}
	begin := func(id string) *SharedSessionWatch {
		serveWatch(p, id, func() []any { return []any{p.event(id, "x", nil)} })
		return watch(t, c, id, nil)
	}

	w := begin("before")
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	p.send(p.event("before", "x", nil), disconnected("before"))
	p.sync()
	noMore("close before", w, nil)

	w = begin("after")
	p.send(disconnected("after"))
	p.sync()
	expectRoutes(t, c)
	noMore("close after", w, ErrDisconnected)

	w = begin("during")
	p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
	closing := []<-chan error{
		async(func() error { return w.Close(testContext(t)) }),
		async(func() error { return w.Close(testContext(t)) }),
	}
	request := p.wait("sessions.close", 2)
	p.send(disconnected("during"))
	p.sync()
	expectRoutes(t, c)
	p.answer(request.ID, map[string]any{})
	for _, done := range closing {
		if err := await(t, "close", done); err != nil {
			t.Error(err)
		}
	}
	noMore("close during", w, ErrDisconnected)

	w = begin("impatient")
	ctx, cancel := context.WithCancel(context.Background())
	closing[0] = async(func() error { return w.Close(ctx) })
	request = p.wait("sessions.close", 3)
	cancel()
	expectFailure(t, await(t, "close", closing[0]), "impatient", context.Canceled)
	expectRoutes(t, c)
	closing[0] = async(func() error { return w.Close(testContext(t)) }) // waits for the same
	p.answer(request.ID, &peerError{Code: -32603, Message: "cannot"})
	var refusal *RPCError
	if err := await(t, "close", closing[0]); !errors.As(err, &refusal) {
		t.Errorf("got %v", err)
	}
	if events, _, last := collect(t, w); len(events) != 1 || last != nil {
		t.Errorf("%d events, then %v", len(events), last)
	}
	expectClosed(t, c, p, "before", "during", "impatient")
}

// TestWatchAwaitsRelease watches an id again, and starts it, while it is being closed.
func TestWatchAwaitsRelease(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	for n, again := range []func() error{
		func() error { return second(c.ResumeSession(testContext(t), "w", nil)) },
		func() error { return second(c.WatchSharedSession(testContext(t), "w", nil)) },
	} {
		w := watch(t, c, "w", nil)
		p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
		ctx, cancel := context.WithCancel(context.Background())
		left := async(func() error { return w.Close(ctx) })
		request := p.wait("sessions.close", n+1)
		cancel()
		await(t, "close", left)
		if err := second(c.WatchSharedSession(ctx, "w", nil)); !errors.Is(err, context.Canceled) { // does not wait longer than its ctx
			t.Errorf("got %v", err)
		}
		seen := len(p.calls(""))
		result := async(again)
		p.sync()
		p.handle("sessions.close", func(*peer, peerMessage) any { return map[string]any{} })
		if now := len(p.calls("")); now != seen {
			t.Errorf("written while the release was open")
		}
		p.answer(request.ID, map[string]any{})
		if err := await(t, "again", result); err != nil {
			t.Error(err)
		}
		if err := w.Close(testContext(t)); err != nil { // once more: the id is not its own any longer
			t.Error(err)
		}
		expectRoutes(t, c, "w")
		if n == 0 {
			c.mu.Lock()
			s := c.routes["w"].session
			c.mu.Unlock()
			if err := s.Disconnect(testContext(t)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestWatchUnderAnIDBeingClosed is assigned an id whose earlier watch is still being closed. It must be closed by a request of its own.
func TestWatchUnderAnIDBeingClosed(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "assigned", nil)
	first := watch(t, c, "a", nil)
	p.handle("sessions.close", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancel(context.Background())
	left := async(func() error { return first.Close(ctx) })
	request := p.wait("sessions.close", 1)
	cancel()
	await(t, "close", left)
	w := watch(t, c, "b", nil)
	closed := async(func() error { return w.Close(testContext(t)) })
	until(t, "close", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return w.releasing != nil
	})
	p.handle("sessions.close", func(*peer, peerMessage) any { return map[string]any{} })
	p.answer(request.ID, map[string]any{})
	if err := await(t, "close", closed); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "assigned", "assigned")
}

// TestCancelledWatch answers a watch whose caller has gone.
func TestCancelledWatch(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	p.handle("sessions.watch", func(*peer, peerMessage) any { return noAnswer })
	ctx, cancel := context.WithCancelCause(context.Background())
	cause := errors.New("bored")
	result := async(func() error { return second(c.WatchSharedSession(ctx, "w", nil)) })
	request := p.wait("sessions.watch", 1)
	cancel(cause)
	err := await(t, "watch", result)
	expectFailure(t, err, "w", context.Canceled)
	expectFailure(t, err, "w", cause)
	p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
	expectClosed(t, c, p, "w")
	expectRoutes(t, c)

	// The answer and the end at the same moment, half the time with both of them waiting for the client: either way it is closed once.
	for i := 2; i < 200; i++ {
		ctx, cancel := context.WithCancel(context.Background())
		var w *SharedSessionWatch
		result := async(func() (err error) {
			w, err = c.WatchSharedSession(ctx, "w", nil)
			return err
		})
		request := p.wait("sessions.watch", i)
		if i%2 == 0 {
			c.mu.Lock()
		}
		ended := async(func() error {
			if i%2 == 0 {
				runtime.Gosched() // so that the answer is first, often
			}
			cancel()
			return nil
		})
		p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
		if i%2 == 0 {
			await(t, "cancel", ended)
			for range 10 {
				runtime.Gosched()
			}
			c.mu.Unlock()
		} else {
			await(t, "cancel", ended)
		}
		switch err := await(t, "watch", result); {
		case err == nil:
			if err := w.Close(testContext(t)); err != nil {
				t.Error(err)
			}
		case !errors.Is(err, context.Canceled):
			t.Error(err)
		}
		if got := len(released(t, c, p, "sessions.close")); got != i {
			t.Fatalf("round %d: closed %d times", i, got)
		}
		expectRoutes(t, c)
	}
}

// TestCancelledWatchThatIsRegistered is the moment in which the answer was handled and its caller has noticed its ctx only.
func TestCancelledWatchThatIsRegistered(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	w := &SharedSessionWatch{client: c, ring: newRing[Event](1)}
	w.sub = w.ring.subscribe()
	var abandoned bool
	if err := c.registerWatch(w, json.RawMessage(`{"sessionId":"w","readOnly":true}`), &abandoned); err != nil {
		t.Fatal(err)
	}
	expectRoutes(t, c, "w")
	w.discard(context.Canceled)
	expectClosed(t, c, p, "w")
	expectRoutes(t, c)
	expectEnd(t, w.sub, context.Canceled)
}

// TestStopRacesWithDisconnect never destroys a watch, and never closes one twice.
func TestStopRacesWithDisconnect(t *testing.T) {
	leakCheck(t)
	for i := 0; i < 1000; i++ {
		t.Run("", func(t *testing.T) { // so that each client ends before the next begins
			c, p := newPeer(t, nil)
			createSession(t, c, &SessionConfig{SessionID: "s"})
			serveWatch(p, "w", nil)
			w := watch(t, c, "w", nil)
			told := async(func() error { p.send(disconnected("w")); return nil })
			stopped := async(func() error { return c.Stop(testContext(t)) })
			if i%3 == 0 {
				if err := w.Close(testContext(t)); err != nil && !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
			}
			if err := await(t, "stop", stopped); err != nil {
				t.Error(err)
			}
			await(t, "disconnect", told)
			await(t, "peer's end", p.ended)
			closed, destroyed := p.calls("sessions.close"), p.calls("session.destroy")
			if len(closed) > 1 || len(closed) == 1 && closed[0].get("sessionId") != "w" {
				t.Errorf("closed %v", closed)
			}
			if len(destroyed) != 1 || destroyed[0].get("sessionId") != "s" {
				t.Errorf("destroyed %v", destroyed)
			}
			if _, _, last := collect(t, w); last != nil && last != ErrDisconnected {
				t.Errorf("last pair %v", last)
			}
			expectRoutes(t, c)
		})
		if t.Failed() {
			return
		}
	}
}

// TestStopReleasesByKind, in good order and where a watch had disconnected before.
func TestStopReleasesByKind(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	createSession(t, c, &SessionConfig{SessionID: "s"})
	serveWatch(p, "gone", nil)
	gone := watch(t, c, "gone", nil)
	p.send(disconnected("gone"))
	p.sync()
	serveWatch(p, "w", func() []any { return []any{p.event("w", "x", nil)} })
	w := watch(t, c, "w", nil)
	p.refuse("sessions.close", -32603, "cannot")
	err := c.Stop(testContext(t))
	expectFailure(t, err, "w", ErrNotConfirmed)
	if n := len(p.calls("sessions.close")); n != 1 || p.calls("sessions.close")[0].get("sessionId") != "w" {
		t.Errorf("%d closes", n)
	}
	if n := len(p.calls("session.destroy")); n != 1 || p.calls("session.destroy")[0].get("sessionId") != "s" {
		t.Errorf("%d destroys", n)
	}
	if events, _, last := collect(t, w); len(events) != 1 || last != nil {
		t.Errorf("%d events, then %v", len(events), last)
	}
	if _, _, last := collect(t, gone); last != ErrDisconnected {
		t.Errorf("last pair %v", last)
	}
	for _, w := range []*SharedSessionWatch{w, gone} {
		_ = w.Close(testContext(t))
	}
	if err := second(c.WatchSharedSession(testContext(t), "w", nil)); !errors.Is(err, ErrClosed) {
		t.Errorf("after the stop: %v", err)
	}
}

// TestWatchAnswerMeetsStop lets the server grant a watch when Stop has begun.
func TestWatchAnswerMeetsStop(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	c.opts.StopGrace = patience
	createSession(t, c, &SessionConfig{SessionID: "s"})
	for _, method := range []string{"sessions.watch", "session.destroy"} {
		p.handle(method, func(*peer, peerMessage) any { return noAnswer })
	}
	result := async(func() error { return second(c.WatchSharedSession(testContext(t), "w", nil)) })
	request := p.wait("sessions.watch", 1)
	stopped := async(func() error { return c.Stop(testContext(t)) })
	destroy := p.wait("session.destroy", 1)
	p.answer(request.ID, map[string]any{"sessionId": "w", "readOnly": true})
	expectFailure(t, await(t, "watch", result), "w", ErrClosed)
	p.wait("sessions.close", 1)
	expectRoutes(t, c, "s")
	p.answer(destroy.ID, map[string]any{"success": true})
	if err := await(t, "stop", stopped); err != nil {
		t.Error(err)
	}
}

// TestWatchEndsWithTheConnection yields what came before.
func TestWatchEndsWithTheConnection(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", func() []any { return []any{p.event("w", "x", nil)} })
	w := watch(t, c, "w", nil)
	p.sync()
	p.conn.Close()
	await(t, "client's end", c.Done())
	if events, _, last := collect(t, w); len(events) != 1 || !errors.Is(last, io.ErrUnexpectedEOF) {
		t.Errorf("%d events, then %v", len(events), last)
	}
	if err := w.Close(testContext(t)); err != nil {
		t.Errorf("close: %v", err)
	}
}

// TestWatchCtxBoundsTheCall cancels a watch's ctx once it has returned.
func TestWatchCtxBoundsTheCall(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	ctx, cancel := context.WithCancel(context.Background())
	w, err := c.WatchSharedSession(ctx, "w", nil)
	cancel()
	if err != nil {
		t.Fatal(err)
	}
	p.send(p.event("w", "x", nil), disconnected("w"))
	if events, _, last := collect(t, w); len(events) != 1 || last != ErrDisconnected {
		t.Errorf("%d events, then %v", len(events), last)
	}
}

func TestRawCloseEndsTheWatch(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	serveWatch(p, "w", nil)
	w := watch(t, c, "w", nil)
	if err := c.Call(testContext(t), "sessions.close", map[string]string{"sessionId": "w"}, nil); err != nil {
		t.Fatal(err)
	}
	expectRoutes(t, c)
	if err := w.Close(testContext(t)); err != nil {
		t.Error(err)
	}
	expectClosed(t, c, p, "w")
}

func TestLifecycle(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	s := createSession(t, c, &SessionConfig{SessionID: "s"})
	var subs []*Subscription[LifecycleEvent]
	for i := 0; i < 3; i++ {
		subs = append(subs, c.SubscribeLifecycle())
	}
	sequence := c.Lifecycle(testContext(t)) // before the watch, and ranged after it
	serveWatch(p, "w", func() []any { return []any{disconnected("w")} })
	w := watch(t, c, "w", nil)
	p.sync()
	expectRoutes(t, c, "s")
	serveWatch(p, "stays", nil)
	watch(t, c, "stays", nil)
	start := "2026-01-02T03:04:05.678Z"
	for _, params := range []any{
		map[string]any{"type": "session.created", "sessionId": "other", "metadata": map[string]any{"startTime": start, "modifiedTime": "broken", "summary": "S"}},
		map[string]any{"type": "session.dreaming", "sessionId": "other", "metadata": 5},
		map[string]any{"type": 5},
		map[string]any{"type": "session.disconnected", "sessionId": "s"}, // no watch
		map[string]any{"type": "session.updated", "sessionId": "s"},
		map[string]any{"type": "session.updated", "sessionId": "stays"},
		map[string]any{"type": "session.deleted", "sessionId": "stays"}, // its end is told as a disconnect
	} {
		p.send(notification("session.lifecycle", params))
	}
	p.sync()
	expectRoutes(t, c, "s", "stays")
	for range 2 { // the server says it twice
		p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": "s"}))
	}
	p.sync()
	expectRoutes(t, c, "stays")
	at, _ := time.Parse(time.RFC3339, start)
	want := []LifecycleEvent{
		{Type: SessionDisconnected, SessionID: "w"},
		{Type: SessionCreated, SessionID: "other", StartTime: at, Summary: "S"},
		{Type: "session.dreaming", SessionID: "other"},
		{},
		{Type: SessionDisconnected, SessionID: "s"},
		{Type: SessionUpdated, SessionID: "s"},
		{Type: SessionUpdated, SessionID: "stays"},
		{Type: SessionDeleted, SessionID: "stays"},
		{Type: SessionDeleted, SessionID: "s"},
		{Type: SessionDeleted, SessionID: "s"},
	}
	for i, e := range want {
		for _, sub := range subs {
			got, err := sub.Next(testContext(t))
			if err != nil || got != e {
				t.Errorf("%d: got %+v %v, want %+v", i, got, err, e)
			}
		}
	}
	if cause := context.Cause(s.Context()); !errors.Is(cause, ErrSessionNotFound) {
		t.Errorf("deleted session: %v", cause)
	}
	if _, _, last := collect(t, w); last != ErrDisconnected {
		t.Errorf("watch: %v", last)
	}
	i := 0
	for got, err := range sequence {
		if err != nil || got != want[i] {
			t.Errorf("sequence %d: %+v %v", i, got, err)
		}
		if i++; i == len(want) {
			break
		}
	}
	late := c.SubscribeLifecycle()
	if err := c.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	if _, err := late.Next(testContext(t)); err != io.EOF {
		t.Errorf("after Stop: %v", err)
	}
	if n := len(p.calls("sessions.close")) + len(p.calls("session.destroy")); n != 1 {
		t.Errorf("%d releases, want that of the one that is left", n)
	}
}
