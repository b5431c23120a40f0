package copilot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
)

// faultConn is the client's end of a connection, with a fault in it.
type faultConn struct {
	net.Conn
	fault

	mu            sync.Mutex
	in, out       int // bytes so far
	writes        int
	heard, spoken []byte // what came and went, where record is set
}

// fault says what goes wrong. The zero value is no fault.
type fault struct {
	cutRead, cutWrite int   // the connection breaks after that many bytes of the direction
	how               error // of a cut
	failWrite         int   // the number of a write that fails and leaves the connection as it is
	most              int   // bytes of a read
	split             int   // no read goes beyond this offset
	record            bool
}

var errFault = errors.New("injected fault")

func (f *faultConn) Read(b []byte) (int, error) {
	f.mu.Lock()
	if f.most > 0 {
		b = b[:min(len(b), f.most)]
	}
	for _, end := range []int{f.split, f.cutRead} {
		if left := end - f.in; left > 0 {
			b = b[:min(len(b), left)]
		}
	}
	broken := f.cutRead > 0 && f.in == f.cutRead
	f.mu.Unlock()
	if broken {
		f.Conn.Close()
		return 0, f.how
	}
	n, err := f.Conn.Read(b)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.in += n
	if f.record {
		f.heard = append(f.heard, b[:n]...)
	}
	return n, err
}

func (f *faultConn) Write(b []byte) (int, error) {
	f.mu.Lock()
	f.writes++
	fails, broken := f.writes == f.failWrite, f.cutWrite > 0 && f.out+len(b) >= f.cutWrite
	if broken {
		b = b[:f.cutWrite-f.out]
	}
	if f.out += len(b); f.record {
		f.spoken = append(f.spoken, b...)
	}
	f.mu.Unlock()
	if fails {
		return 0, errFault
	}
	n, err := f.Conn.Write(b)
	if broken {
		f.Conn.Close()
		err = f.how
	}
	return n, err
}

// faultTalk is a conversation that has everything in it once, from the handshake to the stop. It returns the types of the events that
// came, and what each step said.
func faultTalk(t *testing.T, f fault) (events []EventType, said map[string]error, conn *faultConn) {
	near, far := net.Pipe()
	conn = &faultConn{Conn: near, fault: f}
	p := startPeer(t, far)
	emits := func(result any, events ...map[string]any) peerHandler {
		return func(p *peer, m peerMessage) any {
			all := []any{map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": result}}
			for _, e := range events {
				all = append(all, e)
			}
			p.send(all...)
			return noAnswer
		}
	}
	user := func(id string) map[string]any { return p.event("s", "user.message", map[string]any{"messageId": id}) }
	p.handle("session.create", emits(map[string]any{"sessionId": "s"}, p.event("s", "session.start", nil)))
	sends := 0
	p.handle("session.send", func(p *peer, m peerMessage) any {
		if sends++; sends == 1 {
			return emits(map[string]any{"messageId": "m1"}, user("m1"), p.event("s", "external_tool.requested",
				map[string]any{"requestId": "r", "toolCallId": "c", "toolName": "add", "arguments": map[string]any{"a": 1}}))(p, m)
		}
		return emits(map[string]any{"messageId": "m2"}, user("m2"), p.event("s", "assistant.turn_start", nil))(p, m)
	})
	p.handle("session.tools.handlePendingToolCall", emits(map[string]any{"success": true},
		p.event("s", "external_tool.completed", map[string]any{"requestId": "r"}),
		p.event("s", "assistant.message", map[string]any{"messageId": "a", "content": "two"}), p.event("s", "session.idle", nil)))
	p.handle("session.abort", emits(map[string]any{"success": true},
		p.event("s", "abort", nil), p.event("s", "session.idle", map[string]any{"aborted": true})))

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	said = make(map[string]error)
	c, err := NewClient(ctx, conn, nil)
	if said["connect"] = err; err != nil {
		return nil, said, conn
	}
	add := NewTool("add", "", func(_ context.Context, in struct{ A int }) (int, error) { return in.A + 1, nil })
	prepared, err := c.PrepareSession(&SessionConfig{SessionID: "s", Tools: []Tool{add}})
	if err != nil {
		t.Fatal(err)
	}
	sub := prepared.Subscribe()
	s, err := prepared.Start(ctx)
	if said["start"] = err; err == nil {
		var answer *AssistantMessage
		answer, said["turn"] = s.SendAndWait(ctx, Message{Prompt: "one and one"})
		if said["turn"] == nil && (answer == nil || answer.Content != "two") {
			t.Errorf("%+v: answered %+v", f, answer)
		}
		_, said["send"] = s.Send(ctx, Message{Prompt: "more"})
		said["abort"] = s.Abort(ctx)
		said["disconnect"] = s.Disconnect(ctx)
	}
	said["stop"] = c.Stop(ctx)
	await(t, fmt.Sprintf("%+v: client's end", f), c.Done())
	for e, err := range sub.All(ctx) {
		if said["sequence"] != nil {
			t.Errorf("%+v: a pair after the last one", f)
		}
		if said["sequence"] = err; err == nil {
			events = append(events, e.Type)
		}
	}
	return events, said, conn
}

// faultEvents counts the events in a stream of frames that may be cut.
func faultEvents(stream []byte) (n int) {
	for r := newFrameReader(bytes.NewReader(stream), defaultMaxFrame); ; {
		body, err := r.next()
		if err != nil {
			return n
		}
		if bytes.Contains(body, []byte(`"session.event"`)) {
			n++
		}
	}
}

// TestFaults has a conversation broken at every byte, in both directions, with every write failing, and with reads of every size. Whatever
// happens, every step returns with an error of a known kind, what had arrived whole is delivered, once and in order, and nothing is left.
func TestFaults(t *testing.T) {
	leakCheck(t)
	whole, said, conn := faultTalk(t, fault{record: true})
	for step, err := range said {
		if err != nil {
			t.Fatalf("without a fault: %s: %v", step, err)
		}
	}
	if len(whole) != 10 || len(said) != 8 {
		t.Fatalf("the conversation has %v, %v", whole, said)
	}
	known := func(err, how error) bool {
		return err == nil || errors.Is(err, how) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, ErrClosed)
	}
	check := func(t *testing.T, f fault, how error) []EventType {
		events, said, _ := faultTalk(t, f)
		for step, err := range said {
			if !known(err, how) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%+v: %s: %v", f, step, err)
			}
		}
		if len(events) > len(whole) || !slices.Equal(events, whole[:len(events)]) {
			t.Errorf("%+v: events %v", f, events)
		}
		return events
	}
	stride := 1
	if testing.Short() {
		stride = 17
	}
	t.Run("read cut", func(t *testing.T) {
		for n := 1; n < len(conn.heard); n += stride {
			how := []error{io.EOF, errFault}[n%2]
			if events, arrived := check(t, fault{cutRead: n, how: how}, how), faultEvents(conn.heard[:n]); len(events) != arrived {
				t.Errorf("cut after %d bytes: %d events, %d had arrived", n, len(events), arrived)
			}
		}
	})
	t.Run("write cut", func(t *testing.T) {
		for n := 1; n <= len(conn.spoken); n += stride {
			check(t, fault{cutWrite: n, how: io.ErrClosedPipe}, io.ErrClosedPipe) // as the reader sees its own end closed
		}
	})
	t.Run("write fails", func(t *testing.T) {
		var all sync.WaitGroup // each takes the second in which the reader might have a better reason
		for n := 1; n <= conn.writes; n++ {
			all.Add(1)
			go func() { // ends with the conversation; awaited below
				defer all.Done()
				check(t, fault{failWrite: n}, errFault)
			}()
		}
		all.Wait()
	})
	t.Run("read split", func(t *testing.T) {
		for n := 1; n < len(conn.heard); n += stride {
			if events := check(t, fault{split: n}, nil); len(events) != len(whole) {
				t.Errorf("split at %d: %d events", n, len(events))
			}
		}
		for _, most := range []int{1, 2, 3, 7, 64} {
			if events := check(t, fault{most: most}, nil); len(events) != len(whole) {
				t.Errorf("reads of %d bytes: %d events", most, len(events))
			}
		}
	})
}

// TestAnswersInAnyOrder has a server that answers calls, and tells of two sessions between, in every order.
func TestAnswersInAnyOrder(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	var sessions []*Session
	for _, id := range []string{"a", "b"} {
		sessions = append(sessions, createSession(t, c, &SessionConfig{SessionID: id}))
	}
	const calls = 5
	p.handle("work", func(*peer, peerMessage) any { return noAnswer })
	done := 0
	var permute func(order []int)
	permute = func(order []int) {
		if len(order) < calls {
			for n := range calls {
				if !slices.Contains(order, n) {
					permute(append(slices.Clone(order), n))
				}
			}
			return
		}
		var subs []*Subscription[Event]
		for _, s := range sessions {
			subs = append(subs, s.Subscribe())
		}
		results := make([]<-chan error, calls)
		for n := range calls {
			results[n] = async(func() error {
				var got struct{ N int }
				if err := c.Call(testContext(t), "work", map[string]int{"n": n}, &got); err != nil || got.N != n {
					return fmt.Errorf("call %d: answer %d, %v", n, got.N, err)
				}
				return nil
			})
		}
		ids := make([]peerMessage, calls)
		for i := range calls {
			m := p.wait("work", done+i+1)
			ids[int(m.get("n").(float64))] = m
		}
		done += calls
		for i, n := range order {
			p.send(p.event(sessions[i%2].ID(), "assistant.message_delta", map[string]int{"n": i}),
				map[string]any{"jsonrpc": "2.0", "id": ids[n].ID, "result": map[string]int{"n": n}})
		}
		for _, r := range results {
			if err := await(t, "call", r); err != nil {
				t.Errorf("order %v: %v", order, err)
			}
		}
		for i := range calls {
			if got, want := string(next(t, subs[i%2]).Data), fmt.Sprintf(`{"n":%d}`, i); got != want {
				t.Errorf("order %v: event %s, want %s", order, got, want)
			}
		}
		for _, sub := range subs {
			sub.Close()
		}
	}
	permute(nil)
}
