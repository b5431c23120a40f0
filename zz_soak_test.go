package copilot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/netip"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// soakHeap returns what is on the heap for good.
func soakHeap() int64 {
	runtime.GC()
	runtime.GC() // pools are empty after the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// soakFlat runs cycle n times and fails when more than a hundred bytes are left of each.
func soakFlat(t *testing.T, n int, cycle func()) {
	t.Helper()
	for range 1 + n/10 { // caches fill
		cycle()
	}
	before := soakHeap()
	for range n {
		cycle()
	}
	if grown := soakHeap() - before; grown > int64(100*n+64<<10) {
		t.Errorf("%d bytes are left of %d cycles", grown, n)
	}
}

// TestSoak is much of everything, at a fortieth of its size unless COPILOT_TEST_ROUNDS asks for all: nothing is lost, and nothing is left.
func TestSoak(t *testing.T) {
	create := func(c *Client, cfg *SessionConfig) *Session { // with nothing for the test to keep
		s, err := c.CreateSession(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	t.Run("sessions", func(t *testing.T) {
		leakCheck(t)
		c, n := benchClient(t, "pipe"), spineRounds(10_000)
		emit := func() { // one event to each session
			if err := c.Call(context.Background(), "bench.emit", benchWork{Kind: "delta", Size: 400, Sessions: n}.params(n), nil); err != nil {
				t.Fatal(err)
			}
		}
		emit() // of which the server keeps the frames
		before, goroutines := soakHeap(), runtime.NumGoroutine()
		sessions, subs := make([]*Session, n), make([]*Subscription[Event], n)
		for i := range sessions {
			sessions[i] = create(c, &SessionConfig{SessionID: fmt.Sprint("s", i)})
			subs[i] = sessions[i].Subscribe()
		}
		if g := runtime.NumGoroutine(); g > goroutines {
			t.Errorf("%d goroutines were %d", g, goroutines)
		}
		for range 3 {
			emit()
		}
		for i, s := range sessions {
			if err := s.Disconnect(context.Background()); err != nil {
				t.Fatal(err)
			}
			if events, skipped := soakDrain(t, subs[i]); events != 3 || skipped != 0 {
				t.Fatalf("session %d: %d events, %d skipped", i, events, skipped)
			}
		}
		clear(sessions)
		clear(subs)
		if grown := soakHeap() - before; grown > int64(100*n+64<<10) {
			t.Errorf("%d bytes are left of %d sessions", grown, n)
		}
	})
	t.Run("events", func(t *testing.T) {
		leakCheck(t)
		const many = 256
		c, n := benchClient(t, "pipe"), spineRounds(1_000_000)/many*many
		work := benchWork{Kind: "delta", Size: 400, Sessions: many}
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		turn := make(chan struct{}) // one for each slow reader after each batch
		var slow int
		var readers sync.WaitGroup
		var sessions []*Session
		for i := range many {
			s := createSession(t, c, &SessionConfig{SessionID: fmt.Sprint("s", i), EventBuffer: 16})
			sessions = append(sessions, s)
			s.Events(ctx) // nobody ranges it
			fast := s.Subscribe()
			readers.Add(1)
			go func() { // ends with the session; awaited below
				defer readers.Done()
				soakCount(t, fast, n/many, nil)
			}()
			if i%4 == 0 {
				sub := s.Subscribe()
				slow++
				readers.Add(1)
				go func() { // as above
					defer readers.Done()
					soakCount(t, sub, n/many, turn)
				}()
			}
			if i%4 == 1 { // comes and goes
				readers.Add(1)
				go func() { // as above
					defer readers.Done()
					for s.failure() == nil {
						sub := s.Subscribe()
						for range 5 {
							if _, err := sub.Next(context.Background()); err != nil {
								break
							}
						}
						sub.Close()
					}
				}()
			}
		}
		for sent := 0; sent < n; {
			batch := min(many*20, n-sent)
			if err := c.Call(testContext(t), "bench.emit", work.params(batch), nil); err != nil {
				t.Fatal(err)
			}
			sent += batch
			for range slow {
				turn <- struct{}{}
			}
		}
		close(turn)
		for _, s := range sessions {
			if err := s.Disconnect(testContext(t)); err != nil {
				t.Fatal(err)
			}
		}
		readers.Wait()
	})
	t.Run("cycles", func(t *testing.T) {
		leakCheck(t)
		c := benchClient(t, "pipe")
		soakFlat(t, spineRounds(10_000), func() {
			s := create(c, nil)
			s.Subscribe()
			if err := s.Disconnect(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("clients", func(t *testing.T) {
		spineFlat(t)
		o := spineOptions(t, spineScript{})
		soakFlat(t, spineRounds(1_000), func() {
			c, err := Start(context.Background(), o)
			if err != nil {
				t.Fatal(err)
			}
			if _, err = c.CreateSession(context.Background(), nil); err != nil {
				t.Error(err)
			}
			if err := c.Stop(context.Background()); err != nil {
				t.Fatal(err)
			}
		})
	})
}

// soakDrain reads to the end.
func soakDrain(t *testing.T, sub *Subscription[Event]) (events int, skipped uint64) {
	for _, err := range sub.All(context.Background()) {
		var lag *LagError
		switch {
		case err == nil:
			events++
		case errors.As(err, &lag):
			skipped += lag.Skipped
		default:
			t.Error(err)
		}
	}
	return events, skipped
}

// soakCount reads to the end and checks that nothing is missing. With turns, it reads three events in each as long as there are some, and breaks
// its loop after each.
func soakCount(t *testing.T, sub *Subscription[Event], published int, turns <-chan struct{}) {
	events, skipped := 0, uint64(0)
	if turns != nil {
		for range turns {
			n := 0
			for _, err := range sub.All(context.Background()) {
				var lag *LagError
				if errors.As(err, &lag) {
					skipped += lag.Skipped
				} else {
					events++
				}
				if n++; n == 3 {
					break
				}
			}
		}
	}
	e, s := soakDrain(t, sub)
	if events, skipped = events+e, skipped+s; uint64(events)+skipped != uint64(published) {
		t.Errorf("%d events and %d skipped, of %d", events, skipped, published)
	}
	if turns != nil && published > 200 && skipped == 0 {
		t.Error("a slow reader missed nothing: the test does not test what it says")
	}
}

// TestRouterAgainstModel starts, ends and follows sessions of three ids in random order, and compares what subscribers get with a
// reference that keeps everything.
func TestRouterAgainstModel(t *testing.T) {
	leakCheck(t)
	const size = 8
	ids := []string{"a", "b", "c"}
	for seed := range int64(max(3, spineRounds(400))) {
		random := rand.New(rand.NewSource(seed))
		near, far := net.Pipe()
		p := startPeer(t, far)
		c, err := NewClient(testContext(t), near, nil)
		if err != nil {
			t.Fatal(err)
		}
		type life struct { // of one session, from being prepared to its end
			id       string
			prepared *PreparedSession
			session  *Session
			want     *spineRing
		}
		type reader struct {
			life *life
			sub  *Subscription[Event]
			cur  *spineCursor
		}
		open := make(map[string]*life)
		var readers []*reader
		var lives []*life
		seq := 0
		read := func(r *reader, most int) {
			for range most {
				v, ready, err := r.sub.poll()
				wantV, wantReady, wantErr := r.life.want.poll(r.cur)
				if wantReady && wantErr == nil && (r.cur.closed || r.life.want.ended && r.cur.pos == len(r.life.want.all) && v.Data == nil) {
					wantErr = io.EOF
				}
				var lag, wantLag *LagError
				same := ready == wantReady && errors.As(err, &lag) == errors.As(wantErr, &wantLag)
				switch {
				case !same:
				case lag != nil:
					same = *lag == *wantLag
				case wantErr != nil:
					same = errors.Is(err, wantErr)
				case ready:
					same = err == nil && string(v.Data) == strconv.Itoa(wantV)
				}
				if !same {
					t.Fatalf("seed %d, session %s: got %s, %v, %v, want %d, %v, %v", seed, r.life.id, v.Data, ready, err, wantV, wantReady, wantErr)
				}
				if !ready || err != nil && lag == nil {
					return
				}
			}
		}
		subscribe := func(l *life) {
			r := &reader{life: l, cur: &spineCursor{pos: len(l.want.all)}}
			if r.sub = l.prepared.Subscribe(); l.session != nil {
				r.sub = l.session.Subscribe()
			}
			readers = append(readers, r)
		}
		end := func(l *life, err error) {
			l.want.ended, l.want.err = true, err
			delete(open, l.id)
		}
		for range 150 {
			id := ids[random.Intn(len(ids))]
			l := open[id]
			switch k := random.Intn(100); {
			case k < 40: // an event, for whomever has the id
				p.send(notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"type": "x", "data": seq}}))
				p.sync()
				if l != nil {
					l.want.all = append(l.want.all, seq)
				}
				seq++
			case k < 55:
				prepared, err := c.PrepareSession(&SessionConfig{SessionID: id, EventBuffer: size})
				if err != nil {
					t.Fatal(err)
				}
				next := &life{id: id, prepared: prepared, want: &spineRing{max: size}}
				subscribe(next)
				lives = append(lives, next)
				session, err := prepared.Start(testContext(t))
				if l != nil {
					if !errors.Is(err, ErrSessionOpen) {
						t.Fatalf("seed %d: an open id was started again: %v", seed, err)
					}
					next.want.ended, next.want.err = true, ErrSessionOpen
				} else if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				} else {
					next.session, open[id] = session, next
				}
			case k < 62 && l != nil:
				subscribe(l)
			case k < 67 && l != nil:
				if err := l.session.Disconnect(testContext(t)); err != nil {
					t.Fatal(err)
				}
				end(l, nil)
			case k < 70 && l != nil:
				p.send(notification("session.lifecycle", map[string]any{"type": "session.deleted", "sessionId": id}))
				p.sync()
				end(l, ErrSessionNotFound)
			case k < 75 && len(readers) > 0:
				r := readers[random.Intn(len(readers))]
				r.sub.Close()
				r.cur.closed = true
			case len(readers) > 0:
				read(readers[random.Intn(len(readers))], 1+random.Intn(2*size))
			}
		}
		if random.Intn(2) == 0 {
			far.Close()
			await(t, "client's end", c.Done())
			for _, l := range open {
				end(l, io.ErrUnexpectedEOF)
			}
		} else if err := c.Stop(testContext(t)); err != nil {
			t.Fatal(err)
		}
		for _, l := range open {
			end(l, nil)
		}
		for _, r := range readers {
			read(r, 1+size+1+1)
		}
		for _, l := range lives {
			if l.session != nil && l.session.failure() == nil {
				t.Fatalf("seed %d: a session of %s has no end", seed, l.id)
			}
		}
		near.Close()
	}
}

// TestRouterConcurrently lets sessions of the same ids come and go while their events pass: whoever sees some, sees all of a stretch, in order.
func TestRouterConcurrently(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	ids := []string{"a", "b", "c"}
	stop := make(chan struct{})
	var all sync.WaitGroup
	for _, id := range ids {
		for range 2 { // two that want the same id
			all.Add(1)
			go func() { // ends with stop; awaited below
				defer all.Done()
				for i := 0; !isClosed(stop); i++ {
					prepared, err := c.PrepareSession(&SessionConfig{SessionID: id, EventBuffer: 4 + i%5})
					if err != nil {
						t.Error(err)
						return
					}
					sub := prepared.Subscribe()
					s, err := prepared.Start(testContext(t))
					if errors.Is(err, ErrSessionOpen) {
						runtime.Gosched()
						continue
					}
					if err != nil {
						t.Error(err)
						return
					}
					done := async(func() error {
						last := -1
						for e, err := range sub.All(context.Background()) {
							var lag *LagError
							n, _ := strconv.Atoi(string(e.Data))
							switch {
							case errors.As(err, &lag):
								if last >= 0 {
									last += int(lag.Skipped)
								}
							case err != nil:
								return err
							case last >= 0 && n != last+1:
								return fmt.Errorf("event %d after %d", n, last)
							default:
								last = n
							}
						}
						return nil
					})
					runtime.Gosched()
					if err := s.Disconnect(testContext(t)); err != nil {
						t.Error(err)
					}
					if err := await(t, "reader", done); err != nil {
						t.Error(err)
					}
				}
			}()
		}
	}
	for n := range spineRounds(80_000) {
		var frames []any
		for _, id := range ids {
			frames = append(frames, notification("session.event", map[string]any{"sessionId": id, "event": map[string]any{"type": "x", "data": n}}))
		}
		p.send(frames...)
	}
	close(stop)
	all.Wait()
}

// FuzzAddr compares addresses with what package netip says of them.
func FuzzAddr(f *testing.F) {
	for _, s := range []string{"", "0", "h:0", "1", "65535", "65536", "localhost:80", "http://localhost:80/", "https://[::1]:443", "127.0.0.1:1", "[fe80::1%25lo]:9", ":1", "a:b:c", "http://u@h:1", "h:0x1", "h:+1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := parseAddr(s)
		if want, bad := netip.ParseAddrPort(s); bad == nil && want.Port() != 0 && (err != nil || got != net.JoinHostPort(want.Addr().String(), strconv.Itoa(int(want.Port()))) && want.Addr().Is4()) {
			t.Fatalf("%q: got %q, %v", s, got, err)
		}
		if err != nil {
			if !errors.Is(err, ErrInvalidConfig) || len(err.Error()) > 8*quoteBytes {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		host, port, err := net.SplitHostPort(got)
		n, bad := strconv.ParseUint(port, 10, 16)
		if again, err2 := parseAddr(got); err != nil || bad != nil || n == 0 || host == "" || again != got || err2 != nil {
			t.Fatalf("%q: got %q, which is read as %q, %v", s, got, again, err2)
		}
	})
}

// FuzzPortLine feeds stdout in pieces, and compares with the lines taken one by one.
func FuzzPortLine(f *testing.F) {
	for _, s := range []string{"", "listening on port 1\n", "log\nCLI server listening on port 49152\nmore", "x\nlistening on port 5\n", "listening on port 0\n", "listening on port 70000.\n", "LISTENING ON PORT 8080;", "listening on port"} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, out []byte, piece uint8) {
		want := 0
		for _, line := range strings.Split(string(out), "\n") {
			if m := portLine.FindStringSubmatch(line[:min(len(line), 4*quoteBytes)]); m != nil {
				n, err := strconv.ParseUint(strings.TrimRight(m[1], ".,;"), 10, 16)
				if err == nil {
					want = int(n)
				}
				break
			}
		}
		var s portScanner
		port, over := 0, false
		for rest := out; !over; {
			n := min(len(rest), int(piece)+1)
			port, over = s.write(rest[:n], n == len(rest))
			rest = rest[n:]
		}
		if port != want {
			t.Fatalf("%q in pieces of %d: port %d, want %d", out, piece, port, want)
		}
		if text := s.error().Output; len(text) > quoteBytes || !json.Valid([]byte(strconv.QuoteToASCII(text))) && text == "" {
			t.Fatalf("quotes %d bytes", len(text))
		}
	})
}
