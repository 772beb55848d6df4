-- Give blocks their whole TTL again; of a text's blocks the first shall go last when room is needed.
-- KEYS: index, blocks. ARGV: TTL in ms, names in the index in the order of KEYS. Returns 1 or 0 per block: is it there.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local ttl = tonumber(ARGV[1])
local found = {}
local count = #KEYS - 1
for at = 1, count do
  found[at] = redis.call('PEXPIRE', KEYS[at + 1], ttl + count - at)
  if found[at] == 1 then
    redis.call('ZADD', KEYS[1], string.format('%.0f', now + ttl + count - at), ARGV[at + 1])
  else
    redis.call('ZREM', KEYS[1], ARGV[at + 1])
  end
end
redis.call('PEXPIRE', KEYS[1], ttl + count)
return found
